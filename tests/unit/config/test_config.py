"""Recipes: what loads, what is refused, and in which words."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.errors import BadInput
from sparring.recipe.load import from_data, load
from sparring.recipe.run_config import dump, resolve
from sparring.rollout.config import RolloutConfig

RECIPE = """
[run]
name = "first"

[models.policy.init]
hidden_size = 64

[env]
name = "reasoning_gym"
args = { datasets = [{ name = "gcd", weight = 1 }, { name = "lcm", weight = 2 }] }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "first.toml"
    path.write_text(RECIPE)
    return path


def _refusal_of(recipe: Path, *overrides: str, text: str | None = None) -> str:
    if text is not None:
        recipe.write_text(text)
    with pytest.raises(BadInput) as refusal:
        load(recipe, overrides)
    return str(refusal.value)


def test_a_recipe_is_the_parts_configs_composed(recipe: Path) -> None:
    config = load(recipe)
    assert config.run.name == "first"
    assert config.models["policy"].init.hidden_size == 64
    assert config.rollout == RolloutConfig()


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("rl.steps=7", ("rl", "steps"), 7),
        ("train.learning_rate = 1e-4", ("train", "learning_rate"), 1e-4),
        ("run.name=second", ("run", "name"), "second"),
        ('run.name="a b"', ("run", "name"), "a b"),
        ("run.name=1\nx=2", ("run", "name"), "1\nx=2"),
        ('run.stages=["sft", "rl"]', ("run", "stages"), ("sft", "rl")),
        ("models.policy.init.num_layers=2", ("models", "policy", "init", "num_layers"), 2),
        ("env.args.datasets.1.weight=5", ("env", "args", "datasets", 1, "weight"), 5),
        ("env.args.datasets.0={name='x'}", ("env", "args", "datasets", 0), {"name": "x"}),
        ("sandbox.enabled=false", ("sandbox", "enabled"), False),
    ],
)
def test_an_override_sets_one_key(recipe: Path, override: str, path: tuple, value: object) -> None:
    at: object = load(recipe, [override])
    for key in path:
        at = getattr(at, key) if isinstance(at, msgspec.Struct) else at[key]
    assert at == value


def test_tools_cannot_be_let_write_control_tokens(recipe: Path) -> None:
    assert load(recipe, ['render.control_tokens=["system", "user"]']).render.control_tokens == ("system", "user")
    for role in ("tool", "assistant"):
        said = _refusal_of(recipe, f'render.control_tokens=["user", "{role}"]')
        assert 'render.control_tokens.1: expected one of "system", "user"' in said


def test_the_last_override_wins_and_the_file_stays(recipe: Path) -> None:
    assert load(recipe, ["rl.steps=1", "rl.steps=2"]).rl.steps == 2
    assert recipe.read_text() == RECIPE


def test_a_byte_order_mark_is_no_statement(recipe: Path) -> None:
    before = load(recipe)
    recipe.write_bytes(b"\xef\xbb\xbf" + recipe.read_bytes())
    assert load(recipe) == before


def test_a_path_without_a_recipe_is_refused(tmp_path: Path) -> None:
    assert "expected a recipe" in _refusal_of(tmp_path)
    assert "none.toml: expected a recipe file, got No such file" in _refusal_of(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run\n", "expected TOML, got .* line 1"),
        (
            RECIPE + "[rollout]\ngroup_sizee = 4\n",
            r"rollout.group_sizee: expected one of .* mean rollout.group_size\?$",
        ),
        (RECIPE + "[eval]\ntasks = true\n", "eval.tasks: expected an integer"),
        (RECIPE + '[models.teacher]\npath = "x"\nnumerics = "rough"\n', "models.teacher.numerics: expected one of "),
        ("[env]\nname='x'\n", "run: expected a table"),
        (RECIPE.replace('name = "first"', ""), "run.name: expected a string, got nothing"),
        (RECIPE.replace("models.policy", "models.other"), "expected models"),
    ],
)
def test_the_file_is_the_place_of_what_is_wrong_in_it(recipe: Path, text: str, said: str) -> None:
    assert re.match(f"{re.escape(str(recipe))}: {said}", _refusal_of(recipe, "rl.steps=3", text=text))


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("rl.group_size", "rollout.group_size"),
        ("rollout.temperature", "rollout.sampling.temperature"),
        ("rollout.temperatur", "rollout.sampling.temperature"),
        ("rollout.top-p", "rollout.sampling.top_p"),
        ("engine.max_running", "engine.batch.max_running"),
        ("engine.kv.max_running", "engine.batch.max_running"),
        ("engine.url", "engine.urls"),
        ("rollout.sampling.max_tokens", "rollout.limits.max_tokens"),
    ],
)
def test_a_key_in_the_wrong_place_or_misspelt_is_pointed_to_its_table(recipe: Path, wrong: str, meant: str) -> None:
    assert _refusal_of(recipe, f"{wrong}=4").endswith(f"do you mean {meant}?")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rl.steps=ten", "rl.steps: expected an integer"),
        ("rl.steps=1.5", "rl.steps: expected an integer"),
        ("train.learning_rate=true", "train.learning_rate: expected a number"),
        ("cluster.kind=moon", "cluster.kind: expected one of"),
        ("run.name.0=x", "expected a table"),
        ('run.stages=["init", "zft"]', 'run.stages.1: expected one of "collect", "distill", "eval", '),
        ("run=3", "run: expected a table"),
        ("models.policy.dtype=int8", "models.policy.dtype: expected one of "),
        ("models.policy.init.hidden_sise=8", "do you mean models.policy.init.hidden_size?"),
        ("env.name.x=1", "expected a table"),
        ("env.args.datasets.2.name=1", "expected an index"),
        ("rl.steps", "expected section.key=value"),
        ("=3", "expected section.key=value"),
        ("train.learning_rate=nan", "train.learning_rate: expected a finite number"),
        ("rl.train.learning_rate=inf", "rl.train.learning_rate: expected a finite number"),
        (
            "rollout.limits.timeout_s=-inf",
            "rollout.limits.timeout_s: expected a finite number",
        ),
        (
            "run.seed=9223372036854775808",
            "run.seed: expected a finite number",
        ),
        ("models.policy.init.rope_theta=nan", "models.policy.init.rope_theta: expected a finite number"),
        ("models.policy.init.rope_theta=0", "rope_theta and initializer_range must be above 0"),
        ("models.policy.init.max_positions=1000000000", "max_positions must be 2"),
        ("run.threads=5000", "threads must be 0"),
        ("env.box.timeout_s=1e9", "env.box.timeout_s: expected seconds, from 0.001 to 1000000, got"),
        ("env.box.processes=9223372036854775807", "env.box.processes: expected 1 to 4194304, got"),
        ("rl.steps=0", "rl: expected steps"),
        ("rl.zzzz=4", "; remove it"),
    ],
)
def test_an_invalid_override_is_the_place_of_its_refusal(recipe: Path, override: str, said: str) -> None:
    message = _refusal_of(recipe, "rl.groups_per_step=2", override)
    assert message.startswith(f"--set {override}: ")
    assert said in message


def test_dump_loads_to_the_same_config_and_so_does_its_dump(recipe: Path, tmp_path: Path) -> None:
    config = resolve(load(recipe, ["algo.gate.low=0.1", "rollout.limits.timeout_s=1.5", "run.seed=3"]))
    text = dump(config)
    (tmp_path / "dumped.toml").write_text(text)
    assert load(tmp_path / "dumped.toml") == config
    assert resolve(config) == config
    assert dump(load(tmp_path / "dumped.toml")) == text


@settings(max_examples=40, deadline=None)
@given(
    text=st.text(min_size=1).filter(lambda t: not set(t) & {"/", "\0"} and t not in (".", "..")),
    rate=st.floats(min_value=1e-300, max_value=1e300),
    args=st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.booleans(), st.floats(allow_nan=False))),
)
def test_any_value_survives_the_dump(text: str, rate: float, args: dict) -> None:
    data = {"run": {"name": text}, "models": {"policy": {"path": text}}, "env": {"name": "e", "args": args}}
    config = from_data({**data, "train": {"learning_rate": rate}}, "here")
    assert from_data(tomllib.loads(dump(config)), "there") == config


def test_a_value_that_toml_cannot_express_is_refused_not_lost(recipe: Path) -> None:
    config = load(recipe)
    broken = msgspec.structs.replace(config, env=msgspec.structs.replace(config.env, args={"a": None}))
    with pytest.raises(BadInput, match="expected values that TOML can express"):
        dump(broken)


def test_resolve_replaces_auto_by_this_machine(recipe: Path) -> None:
    resolved = resolve(load(recipe)).run
    assert resolved.device in ("cpu", "cuda") and resolved.threads >= 1
    assert resolve(load(recipe, ["run.device=cpu", "run.threads=3"])).run.threads == 3


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ((), ("none", "behaviour")),
        (("models.policy.numerics=fast",), ("token weights of at most 2", "proximal")),
        (("engine.kind=vllm",), ("token weights of at most 2", "proximal")),
        (("engine.kind=vllm", "algo.correction=none"), ("none", "behaviour")),
        (("engine.kind=vllm", "algo.preset=m2po"), ("none", "behaviour")),
        (("algo.correction=tis",), ("token weights of at most 2", "proximal")),
        (("algo.correction=off_policy_mask",), ("sequences rejected above a mean k1 of 0.01", "behaviour")),
        (("algo.correction=metrics",), ("token weights of at most 2, measured only", "behaviour")),
    ],
)
def test_resolve_chooses_a_correction_where_engine_and_trainer_differ(
    recipe: Path, settings: tuple[str, ...], chosen: tuple[str, str]
) -> None:
    config = resolve(load(recipe, settings))
    assert (config.algo.correction_rule.in_words(), config.algo.anchor) == chosen and resolve(config) == config
    assert from_data(tomllib.loads(dump(config)), "there") == config


def test_config_imports_nothing_heavy(recipe: Path) -> None:
    code = f"""
import sys
from sparring.recipe.load import load
from sparring.recipe.run_config import dump, resolve
dump(resolve(load({str(recipe)!r})))
print(sorted({{"torch", "transformers", "numpy", "pyarrow", "tokenizers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
