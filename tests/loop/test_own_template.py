"""A chat template of one's own: what the run writes, what its export has, and which are refused before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from os import environ
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.render.load import load_renderer
from sparring.stages.models.exported_format import recorded_prompts
from sparring.store.sqlite import SqliteStore


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[None]:
    before = dict(environ)
    environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    yield
    environ.clear()
    environ.update(before)


@pytest.fixture
def own(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint's template with another heading over the tools."""
    file = tmp_path / "own.jinja"
    text = (checkpoint / "chat_template.jinja").read_text(encoding="utf-8")
    file.write_text(text.replace("# Tools", "# Instruments"), encoding="utf-8")
    return file


def _sets(own: Path, *settings: str) -> list[str]:
    small = ("rl.steps=1", "rl.groups_per_step=1", "rollout.group_size=2", 'run.stages=["rl","export"]')
    return [
        "--set",
        f"models.policy.template={own}",
        *(word for each in (*small, *settings) for word in ("--set", each)),
    ]


def test_the_run_and_its_export_write_it(given: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", str(given), *_sets(own)]) == 0, capsys.readouterr()
    run = tmp_path / "runs/tiny"
    renderer = load_renderer(run / "export")
    with closing(SqliteStore(run / "store.sqlite", read_only=True)) as store:
        prompts = list(recorded_prompts(store))
    assert prompts
    for prompt in prompts:
        assert "# Instruments" in renderer.decode(prompt.tokens)
        assert list(renderer.render(prompt.messages, prompt.tools).tokens) == list(prompt.tokens)
    own.write_text(own.read_text().replace("# Instruments", "# Devices"))
    assert main(["run", str(given), *_sets(own)]) == 2
    assert "the text of models.policy.template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ raise_exception('not I') }}", "not I"),
        ("{% for message in messages %}<|im_start|>{{ message.role }}\n", "a chat template in Jinja"),
        ("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", "template"),
        (
            "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "tools",
        ),
        (b"\xff\xfe", "a text file"),
        (None, "a text file"),
    ],
    ids=["raises", "unclosed", "other text", "forgets tools", "binary", "absent"],
)
def test_what_does_not_write_the_messages_is_refused(
    given: Path, own: Path, text: str | bytes | None, said: str, capsys: pytest.CaptureFixture
) -> None:
    own.unlink() if text is None else own.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["check", str(given), *_sets(own)]) == 2
    assert said in capsys.readouterr().err


def test_it_belongs_to_a_checkpoint_that_writes_by_its_template(
    given: Path, own: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["check", str(given), *_sets(own, "models.policy.renderer=qwen3")]) == 2
    assert "renderer must be auto or template" in capsys.readouterr().err
