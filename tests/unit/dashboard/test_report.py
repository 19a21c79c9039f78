"""The report, rendered by a real browser."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refused_at

from sparring.dashboard.report import embedded_json, write_report
from sparring.store.sqlite import SqliteStore


@pytest.fixture(scope="session")
def dom(sample_run: Path, browse: Callable[[str], str]) -> str:
    """The document of the sample's report."""
    return browse(write_report(sample_run).as_uri())


def part(dom: str, begin: str, end: str) -> str:
    """The document from one mark up to the next other."""
    found, _, rest = dom[dom.index(begin) :].partition(end)
    assert rest, f"{end} behind {begin}"
    return found


def test_it_draws_itself(dom: str) -> None:
    assert 'data-ready="yes"' in dom
    assert ">sample</h1>" in dom
    assert "group without variance: 455\u202f001 (37.8 %)" in dom, "the account of tokens adds up in names"


def test_tables_have_a_row_per_dataset_and_per_stage(dom: str) -> None:
    table = part(dom, '<table id="evaluation-table">', "</table>")
    assert table.count("<tr") == 1 + 4 + 1
    assert "95.2 %" in table and "base_conversion" in table
    stages = part(dom, '<table id="stage-table">', "</table>")
    assert re.findall("<tr[^>]*><td>([a-z]+)</td>", stages) == ["init", "sft", "rl", "eval", "export"]


def test_the_time_of_engine_and_trainer_is_told_by_cause(dom: str) -> None:
    timeline = part(dom, '<div class="panel timeline">', '<div class="charts">')
    assert "What went on in 2 min 00 s of steps" in timeline
    assert re.findall(r"<text[^>]*>(\w+)</text>", timeline) == ["engine", "worlds", "trainer"]
    assert timeline.count("<rect") == 3 * 60 and "step 60: worlds 30.0 % of 2.0 s" in timeline
    assert re.findall(r"</i>([^<]*)", timeline) == [
        "engine busy 66 s (55.0 %)",
        "idle: training 42 s (35.0 %)",
        "idle for nothing of these 12 s (10.0 %)",
        "trainer busy 42 s (35.0 %)",
        "idle: generating 48 s (40.0 %)",
        "idle: slowest rollout 18 s (15.0 %)",
        "idle for nothing of these 12 s (10.0 %)",
    ]


def test_events_of_parts_are_on_the_timeline_and_in_a_table(dom: str) -> None:
    timeline = part(dom, '<div class="panel timeline">', "</svg>")
    [line] = re.findall(r'<line x1="([\d.]+)" x2="\1"[^>]*><title>step 30: engine 1 is left out', timeline)
    assert float(line) == 80 + 920 / 2, "30 of 60 steps of the same length"
    table = part(dom, '<table id="events-table">', "</table>")
    assert table.count("<tr") == 1 + 2 and "a fact" not in table
    assert "<td>rl</td><td>30</td><td>engine 1 is left out: &lt;/script&gt;" in table


def test_figures_of_engines_and_ranks_are_in_one_chart_each(dom: str) -> None:
    for title, names in (("Tokens a second by engine", "engine"), ("Wait at the sum by rank", "rank")):
        chart = part(dom, f"<h3>{title}</h3>", "</svg>")
        assert re.findall(r"</i>([^<]*)", chart) == [f"{names} 0", f"{names} 1"], title


def test_viewer_shows_tokens_of_each_source(dom: str) -> None:
    talk = dom[dom.index('class="talk"') :]
    assert 'class="t sampled"' in talk
    assert '<span class="t special">&lt;|im_start|&gt;</span>' in talk
    assert re.search(r'class="t sampled" style="background: color-mix', talk)
    assert "<b>tool</b>" in talk and "<b>prompt</b>" in talk
    assert '<div class="fork">fork: auxiliary titles</div>' in talk and '<div class="quotes">quotes 4</div>' in talk
    assert '<div class="label">auxiliary</div>' in talk


def test_text_of_a_rollout_stays_text(dom: str) -> None:
    assert "<title>sample · Sparring</title>" in dom
    assert "<img" not in dom
    assert dom.count("</script>") == 2
    talk = dom[dom.index('class="talk"') :]
    assert "onerror" in re.sub(r"<[^>]*>", "", talk)


@pytest.mark.full
def test_filters_narrow_the_list_and_modes_recolour(
    sample_run: Path, tmp_path: Path, browse: Callable[[str], str]
) -> None:
    act = """
    const filter = document.querySelector('select[aria-label="outcome"]');
    const pick = (value) => { filter.value = value; filter.dispatchEvent(new Event("change")); };
    const color = () => document.querySelector(".t.sampled").style.background;
    const said = [document.querySelectorAll(".list button").length];
    pick("infra_failed");
    said.push([...document.querySelectorAll(".list .badge")].map((b) => b.textContent).join());
    said.push(document.querySelector(".failure").textContent.slice(0, 20));
    pick("");
    const before = color();
    document.querySelectorAll(".talk .bar button")[3].click();
    said.push(before !== color(), document.querySelector(".talk .bar .key").textContent);
    document.title = said.join(" / ");
    """
    text = write_report(sample_run).read_text()
    text = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("main();\n</script>", "main();</script>")
    page = tmp_path / "page.html"
    page.write_text(text.replace("main();</script>", f"main();{act}</script>"))
    title = re.search(r"<title>(.*?)</title>", browse(page.as_uri()))
    assert title is not None
    total, outcomes, failure, recoloured, versions = title[1].split(" / ")
    assert int(total) > 20
    assert outcomes == "infra_failed,infra_failed,infra_failed"
    assert failure == "SandboxError at box:"
    assert recoloured == "true"
    assert versions == "version 59"


def test_nothing_outside_the_file_is_named(sample_run: Path) -> None:
    text = write_report(sample_run).read_text()
    outside = set(re.findall(r"https?://[\w./-]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not outside
    assert "default-src 'none'" in text


def test_only_the_report_is_written(sample_run: Path) -> None:
    def contents() -> dict[Path, bytes]:
        own = ("report.html", "store.sqlite-shm")  # the other is SQLite's own table of readers
        return {path: path.read_bytes() for path in sample_run.rglob("*") if path.is_file() and path.name not in own}

    write_report(sample_run)
    before = contents()
    write_report(sample_run)
    assert contents() == before


def test_embedded_json_cannot_end_its_element_and_holds_whatever_comes() -> None:
    text = embedded_json({"a": "</script><!--&\u2028\ud800", "b": [float("nan"), float("inf"), 0.5], 3: "x"})
    assert not set("<>&\u2028") & set(text)
    back = json.loads(text)
    assert back == {"a": "</script><!--&\u2028\ud800", "b": [None, None, 0.5], "3": "x"}


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path, browse: Callable[[str], str]) -> None:
    SqliteStore(tmp_path / "store.sqlite").close()
    dom = browse(write_report(tmp_path).as_uri())
    assert 'data-ready="yes"' in dom
    assert "has not written its summary yet" in dom
    assert 'id="evaluation"' not in dom and 'id="rollouts"' not in dom


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with refused_at(str(tmp_path), "a run's folder"):
        write_report(tmp_path)
