"""A run that trains adapters: one through sft and rl, exact in every step, small on disk, merged at the end."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparring.cli.main import main
from sparring.model.load import load
from sparring.model.peft import base_of, read_config
from sparring.testing.tiny_models import tiny_model

TINY = Path(__file__).parent / "tiny.toml"
WORLD = Path(__file__).parent / "tiny_world.py:Sums"
LORA = ("models.policy.lora.rank=4", "models.policy.lora.alpha=8")


def arguments(folder, *more, recipe=TINY):
    settings = (f"run.directory={folder}", f"env.name={WORLD}", "observe.lines_every_s=0", *LORA, *more)
    return ["run", str(recipe), *(part for setting in settings for part in ("--set", setting))]


def bits(file):
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


def adapter(folder, stage):
    return bits(folder / "tiny" / stage / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("lora")
    assert main(arguments(folder)) == 0
    return folder


def test_every_step_was_exact(whole):
    lines = [json.loads(line) for line in (whole / "tiny/metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line["stage"] == "rl" and "step" in line]
    assert [values["logprob_max_abs_diff"] for values in steps] == [0.0] * 6
    assert all(values["updated"] for values in steps)


def test_one_adapter_goes_through_the_stages_beside_an_untouched_base(whole):
    untrained, imitated, reinforced = (adapter(whole, stage) for stage in ("lora_start", "sft/model", "rl/model"))
    assert untrained.keys() == imitated.keys() == reinforced.keys()
    for name in untrained:
        assert len({untrained[name], imitated[name], reinforced[name]}) == 3, name
    assert adapter(whole, "lora") == reinforced
    for stage in ("lora", "lora_start", "sft/model", "rl/model"):
        assert base_of(whole / "tiny" / stage) == str(whole / "tiny/init/model")
        assert read_config(whole / "tiny" / stage).rank == 4


def test_a_checkpoint_holds_the_adapter_alone(whole):
    last = whole / "tiny/rl/checkpoints/step-000006"
    state = load_file(last / "model.safetensors")
    assert {name.rpartition("lora_")[2] for name in state} == {"A.weight", "B.weight", "scale"}
    written = adapter(whole, "rl/model")
    assert {f"base_model.model.{n}": t.numpy().tobytes() for n, t in state.items() if n != "lora_scale"} == written
    moments = load_file(last / "optimiser.safetensors")
    assert {name.partition("/")[2] for name in moments} == state.keys() - {"lora_scale"}


def test_the_export_is_merged(whole, tmp_path):
    """The plain checkpoint says what base and adapter say, but for the rounding of the merge."""
    merged, adapted, base = (load(whole / "tiny" / place) for place in ("export", "rl/model", "init/model"))
    assert merged.adapters.everywhere is None and adapted.adapters.everywhere is not None
    one, other, before = (
        library_logits(model.module) if model is not adapted else own_logits(model) for model in (merged, adapted, base)
    )
    assert (one - other).abs().max() <= 2e-6 < 1e-3 < (before - other).abs().max()
    shutil.copytree(whole / "tiny/rl/model", tmp_path / "adapter")
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    assert bits(tmp_path / "out/model.safetensors") == bits(whole / "tiny/export/model.safetensors")


def test_a_rollout_is_sampled_again(whole, capsys):
    """Under the adapter before the first step, under a kept one, and in an evaluation."""
    for rollout in ("rl/0/0", "rl/9/1", "eval/rl/0"):
        found = main(["replay", str(whole / "tiny"), rollout])
        assert found == 0, capsys.readouterr()


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(whole, tmp_path, killed_and_finished):
    killed_and_finished(arguments(tmp_path), ["sft 3/6", "rl 3/6"])
    for stage in ("lora", "lora_start", "sft/model", "rl/model"):
        assert adapter(tmp_path, stage) == adapter(whole, stage)
    assert bits(tmp_path / "tiny/export/model.safetensors") == bits(whole / "tiny/export/model.safetensors")


def test_a_run_goes_on_with_a_given_adapter(whole, tmp_path):
    """From the adapter that sft left, rl alone learns what it learnt there."""
    head, rest = TINY.read_text().split("[models.policy.init]")
    recipe = tmp_path / "given.toml"
    recipe.write_text(
        f'{head}[models.policy]\npath = "{whole / "tiny/sft/model"}"\n\n[env]{rest.partition("[env]")[2]}'
    )
    assert main(arguments(tmp_path, 'run.stages=["rl"]', recipe=recipe)) == 0
    assert adapter(tmp_path, "rl/model") == adapter(whole, "rl/model")
    assert base_of(tmp_path / "tiny/rl/model") == str(whole / "tiny/init/model")


def mixture(family, whole, folder):
    """A base with the tokenizer of a run, and the run's recipe on it."""
    source = whole / "tiny/init/model"
    size = json.loads((source / "config.json").read_text())["vocab_size"]
    base = tiny_model(family, folder / "base", seed=1, vocab_size=size)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / file, base)
    head, rest = TINY.read_text().split("[models.policy.init]")
    recipe = folder / "experts.toml"
    recipe.write_text(f'{head}[models.policy]\npath = "{base}"\n\n[env]{rest.partition("[env]")[2]}')
    return base, recipe


@pytest.mark.full
def test_experts_learn_in_a_run(whole, tmp_path, capsys):
    """A mixture of experts with factors for its experts and its queries: exact in every step, merged at the end."""
    base, recipe = mixture("qwen3_moe", whole, tmp_path)
    stacks = '["experts.gate_up_proj", "experts.down_proj"]'
    targets = ('models.policy.lora.target_modules=["q_proj"]', f"models.policy.lora.target_parameters={stacks}")
    assert main(arguments(tmp_path, 'run.stages=["rl", "export"]', *targets, recipe=recipe)) == 0
    assert "target_parameters ('experts.gate_up_proj', 'experts.down_proj')" in "".join(capsys.readouterr())
    lines = [json.loads(line) for line in (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()]
    assert {line["values"]["logprob_max_abs_diff"] for line in lines if line["stage"] == "rl" and "step" in line} == {
        0.0
    }
    untrained, trained = adapter(tmp_path, "lora_start"), adapter(tmp_path, "lora")
    assert untrained.keys() == trained.keys() and len(trained) == 12
    assert all(untrained[name] != trained[name] for name in trained)
    merged, adapted = load(tmp_path / "tiny/export"), load(tmp_path / "tiny/rl/model")
    assert (
        (own_logits(merged) - own_logits(adapted)).abs().max()
        <= 2e-5
        < (own_logits(load(base)) - own_logits(adapted)).abs().max()
    )
    assert main(["replay", str(tmp_path / "tiny"), "rl/0/0"]) == 0


def test_experts_that_a_stage_would_refuse_are_refused_before(whole, tmp_path, capsys):
    """The library computes those of Nemotron-H."""
    _, recipe = mixture("nemotron_h", whole, tmp_path)
    settings = ('models.policy.lora.target_parameters=["experts.down_proj"]', 'models.policy.numerics="fast"')
    assert main(["check", *arguments(tmp_path, 'run.stages=["rl"]', *settings, recipe=recipe)[1:]]) == 2
    assert "experts that our own layers compute" in "".join(capsys.readouterr())


def own_logits(model):
    from sparring.model.attention import Packed

    tokens = torch.arange(40)
    return model.logits(model.hidden(tokens, tokens, Packed.of([40]))).detach()


def library_logits(module):
    module.set_attn_implementation("eager")
    return module(input_ids=torch.arange(40)[None]).logits[0].detach()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("models.policy.lora.rank=0", "rank must be at least 1"),
        ("models.policy.lora.alpha=0", "alpha must be above 0"),
        ('models.policy.lora.target_modules="attention"', "a list of names, all-linear or default"),
        ("models.policy.lora.target_modules=[]", "at least one linear layer"),
        ('models.policy.lora.target_modules=["q_proj", "lm_head"]', "expected linear layers of the model: down_proj"),
        ("models.policy.lora.dropout=0.1", "dropout"),
        (
            "engine.kind=openai engine.urls=['http://127.0.0.1:9'] models.policy.lora.rank=4",
            "models.policy.lora: expected none with an OpenAI",
        ),
    ],
)
def test_check_refuses_what_cannot_be_trained(tmp_path, capsys, setting, message):
    given = setting.split(" ") if "engine" in setting else [setting]
    settings = [part for one in (f"run.directory={tmp_path}", f"env.name={WORLD}", *given) for part in ("--set", one)]
    assert main(["check", str(TINY), *settings]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ((), "models.policy.lora: expected rank 4, as the adapter"),
        (("models.policy.lora.rank=8",), "models.policy.lora: expected rank 4 and scale 2"),
        (("models.policy.lora.rank=4", "models.policy.lora.alpha=9"), "got rank 4 and scale 2.25"),
        (LORA, None),
    ],
)
def test_check_compares_with_a_given_adapter(whole, tmp_path, capsys, lora, message):
    head, rest = TINY.read_text().split("[models.policy.init]")
    recipe = tmp_path / "given.toml"
    recipe.write_text(
        f'{head}[models.policy]\npath = "{whole / "tiny/sft/model"}"\n\n[env]{rest.partition("[env]")[2]}'
    )
    settings = [part for one in (f"run.directory={tmp_path}", f"env.name={WORLD}", *lora) for part in ("--set", one)]
    assert main(["check", str(recipe), *settings]) == (2 if message else 0)
    printed = capsys.readouterr()
    assert message is None or message in printed.err
    assert message is not None or "lora: goes on with the adapter" in printed.out
