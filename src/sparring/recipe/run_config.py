"""One `RunConfig` describes a run: the parts' configs composed, loaded from TOML, overridden, resolved and dumped.

Imports nothing but the parts' config modules. What a key means stands beside its owner, in the part's own `recipe/run_config.py`;
this module only knows how the sections are called and how to say precisely what is wrong with one.
"""

from __future__ import annotations

import copy
import ctypes
import difflib
import importlib.util
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from sparring.algo.config import INEXACT, AlgoConfig, Correction, named
from sparring.engine.config import EngineConfig
from sparring.envs.config import EnvConfig
from sparring.errors import BadInput, refusal
from sparring.model.config import ModelConfig
from sparring.observe.config import ObserveConfig
from sparring.render.config import RenderConfig
from sparring.rollout.config import RolloutConfig
from sparring.sandbox.config import SandboxConfig
from sparring.recipe.sections import (
    NAMED,
    CollectConfig,
    DistillConfig,
    EvalConfig,
    ExportConfig,
    PreferenceConfig,
    RewardModelConfig,
    RlConfig,
    RunSection,
    SftConfig,
)
from sparring.train.config import TrainConfig

Key = str | int

STAGES = ("sft", "preference", "reward_model", "rl", "distill")
OVERRIDES: tuple[tuple[str, ...], ...] = (*((stage, "train") for stage in STAGES), ("rl", "critic", "train"))
"""Tables that hold any keys of `[train]`."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run. Every section is the config of the part that bears its name."""

    run: RunSection
    """What the run is called, where it lives and which stages it consists of."""

    models: dict[str, ModelConfig]
    """Models stand once, by name; every part names one. `policy` is the one that is trained."""

    env: EnvConfig
    """The world."""

    sandbox: SandboxConfig = SandboxConfig()
    """Where the policy's code runs."""

    engine: EngineConfig = EngineConfig()
    """How tokens are sampled."""

    render: RenderConfig = RenderConfig()
    """How messages become tokens."""

    rollout: RolloutConfig = RolloutConfig()
    """How tasks become scored groups."""

    train: TrainConfig = TrainConfig()
    """How weights are updated."""

    algo: AlgoConfig = AlgoConfig()
    """How scores become advantages and losses."""

    collect: CollectConfig = CollectConfig()
    """The stage that gathers a teacher's traces."""

    sft: SftConfig = SftConfig()
    """The supervised stage."""

    preference: PreferenceConfig = PreferenceConfig()
    """The stage that learns from compared replies."""

    reward_model: RewardModelConfig = RewardModelConfig()
    """The stage that trains a reward model."""

    rl: RlConfig = RlConfig()
    """The reinforcement-learning stage."""

    distill: DistillConfig = DistillConfig()
    """The distillation stage."""

    eval: EvalConfig = EvalConfig()
    """The evaluation stage."""

    export: ExportConfig = ExportConfig()
    """The export stage."""

    observe: ObserveConfig = ObserveConfig()
    """Where metrics go."""

    def __post_init__(self) -> None:
        if "policy" not in self.models:
            raise ValueError(f"models must have a table [models.policy], got {sorted(self.models) or 'no table'}")


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe and apply overrides to it.

    Args:
        path: a TOML file.
        overrides: `a.b=value` each, applied in order. The value is TOML (`3`, `true`, `[1, 2]`); what is not TOML is
            taken as a string. A number in the path picks from a list: `env.datasets.0.weight=2`.

    Raises:
        BadInput: the file cannot be read, is not TOML, or says something that no part understands.
    """
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal(str(path), "a recipe file", error.strerror or str(error), "check the path") from error
    except ValueError as error:
        raise refusal(str(path), "TOML", str(error), "correct the file there") from error
    return from_data(data, str(path), overrides)


def from_data(data: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The same for a recipe that is already parsed. `where` names its source in errors.

    Raises:
        BadInput: as `load`.
    """
    states = [(where, data)]
    for override in overrides:
        states.append((f"--set {override}", _overridden(states[-1][1], override)))
    try:
        config = _converted(states[-1][1])
    except msgspec.ValidationError as error:
        source, culprit = next(s for s in states if _complaint(s[1]) == str(error))
        raise _translated(str(error), culprit, source) from error
    for keys, got in _no_numbers(states[-1][1]):
        source = next(source for source, state in states if dict(_no_numbers(state)).get(keys) == got)
        raise refusal(_join(source, keys), "a finite number of at most 64 bits", got, "write one")
    return config


def resolve(config: RunConfig) -> RunConfig:
    """Replace what depends on the machine, `device = "auto"` and `threads = 0`, and on other sections, `correction =
    "auto"`. A resolved config resolves to itself.

    Raises:
        BadInput: the device is not there.
    """
    device = config.run.device
    if device != "cpu":
        usable = _cuda_usable()
        if device == "cuda" and not usable:
            raise refusal(
                "run.device", "a GPU and a torch built for it", "none that can be used", 'write "cpu" or "auto"'
            )
        device = "cuda" if usable else "cpu"
    threads = config.run.threads or len(os.sched_getaffinity(0))
    algo = config.algo
    if algo.correction == "auto":
        policy = config.models.get("policy")
        exact = config.engine.exact and (policy is None or policy.numerics == "exact")
        chosen: dict[str, Any] = {"correction": Correction()} if exact else INEXACT
        if algo.anchor == "loglinear":  # which is a proximal policy, too
            chosen = {**chosen, "anchor": algo.anchor}
        algo = msgspec.structs.replace(algo, **chosen)
    return msgspec.structs.replace(
        config, run=msgspec.structs.replace(config.run, device=device, threads=threads), algo=algo
    )


def dump(config: RunConfig) -> str:
    """The complete config as TOML text that loads to an identical config.

    Raises:
        BadInput: a value that TOML cannot express, such as None where the default is something else.
    """
    text = tomli_w.dumps(_without_none(msgspec.to_builtins(config)))
    if msgspec.convert(tomllib.loads(text), RunConfig, strict=True) != config:
        raise refusal(
            "the config", "values that TOML can express", "a None or a NaN", "leave those keys at their defaults"
        )
    return text


def _without_none(value: Any) -> Any:
    """TOML has no null: an absent key means the default, which `dump` verifies to be the same."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, (list, tuple)) else value


def _cuda_usable() -> bool:
    """Whether the driver shows a device and the installed torch was built for it, asked without importing torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.origin or not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _overridden(data: dict[str, Any], override: str) -> dict[str, Any]:
    """A copy of `data` with one `a.b=c` applied."""
    where = f"--set {override}"
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise refusal(where, "section.key=value", repr(override), "write it like rl.steps=10")
    result = copy.deepcopy(data)
    at: Any = result
    for depth, key in enumerate(keys):
        here = ".".join(keys[:depth]) or "the recipe"
        if isinstance(at, list):
            if not key.isdigit() or int(key) >= len(at):
                raise refusal(where, f"an index below {len(at)} into the list {here}", key, "count from 0")
            index: Key = int(key)
        elif isinstance(at, dict):
            index = key
        else:
            raise refusal(where, f"a table at {here}", json.dumps(at, default=str), "set that key itself")
        if depth == len(keys) - 1:
            at[index] = _toml_value(text)
        else:
            at = at.setdefault(index, {}) if isinstance(at, dict) else at[index]
    return result


def _toml_value(text: str) -> Any:
    """`text` as a TOML value; as itself where it is none, so that `--set run.name=first` needs no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text.strip()}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _no_numbers(whole: Any) -> Iterator[tuple[tuple[Key, ...], str]]:
    """Where a number is asked for and what stands there none can compute with, and what it is: `nan`, `inf`, too many
    digits."""
    for keys, value in _leaves(whole):
        wide = isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
        if wide or isinstance(value, float) and not math.isfinite(value):
            if not isinstance(_type_at(keys, whole), msgspec.inspect.AnyType):
                yield keys, str(value)


def _leaves(data: Any, keys: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], Any]]:
    if isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _leaves(value, (*keys, key))
    else:
        yield keys, data


def _complaint(data: dict[str, Any]) -> str | None:
    """What msgspec says against `data`, None if nothing."""
    try:
        _converted(data)
    except msgspec.ValidationError as error:
        return str(error)
    return None


def _converted(data: dict[str, Any]) -> RunConfig:
    whole = {**data, "algo": named(data["algo"])} if "algo" in data else dict(data)
    for (section, key), name in NAMED.items():
        value = whole[section].get(key) if isinstance(whole.get(section), dict) else None
        if isinstance(value, (str, dict)):
            table = {"name": value} if isinstance(value, str) else {"name": name, **value}
            whole[section] = {**whole[section], key: table}
    return msgspec.convert(whole, RunConfig, strict=True)


_AT = re.compile(r" - at (?:key in )?`\$([^`]*)`")
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]|(?P<any>\[\.\.\.\])")


def _translated(complaint: str, data: dict[str, Any], source: str) -> BadInput:
    """msgspec's complaint in the one form of refusal, with the path that the user wrote."""
    path = "".join(
        reversed(_AT.findall(complaint))
    )  # where one validation runs inside another, the inner path comes first
    keys = tuple(_keys(path, complaint, data))
    what = _AT.split(complaint)[0]
    quoted = re.search(r"`(\w+)`", what)
    name = quoted[1] if quoted else ""
    if "unknown field" in what:
        where, known = _join(source, (*keys, name)), _fields(keys, data)
        return refusal(where, f"one of {', '.join(sorted(known))}", "an unknown key", _advice(name, keys, known))
    if "missing required field" in what:
        table = f"[{_dotted(keys)}]" if keys else "the recipe"
        return refusal(
            _join(source, (*keys, name)), _described((*keys, name), data), "nothing", f"add {name} to {table}"
        )
    value = _value(data, keys)
    if what.startswith(("Expected", "Invalid enum", "Invalid value")):
        given = json.dumps(value, default=str)
        return refusal(_join(source, keys), _described(keys, data), given[:80], "write a value of that kind")
    given = "" if ", got" in what else f", got {json.dumps(value, default=str)[:200]}"
    return BadInput(f"{_join(source, keys)}: expected {what}{given}; correct it there or with --set")


def _keys(path: str, complaint: str, data: dict[str, Any]) -> Iterator[Key]:
    """msgspec's path as keys. It writes `[...]` for a name in a table: find which name brings the same complaint
    alone."""
    done: list[Key] = []
    for step in _STEP.finditer(path):
        key: Key = step["name"] or (int(step["index"]) if step["index"] else "")
        if step["any"]:
            table = _value(data, done)
            key = next((k for k in table if _complaint(_narrowed(data, done, k)) == complaint), "*")
        done.append(key)
        yield key


def _narrowed(data: dict[str, Any], keys: Sequence[Key], only: str) -> dict[str, Any]:
    """A copy of `data` whose table at `keys` has nothing but `only`."""
    result = copy.deepcopy(data)
    table = _value(result, keys)
    for other in [k for k in table if k != only]:
        del table[other]
    return result


def _value(data: Any, keys: Sequence[Key]) -> Any:
    for key in keys:
        data = data if isinstance(data, str) else data[key]  # a name alone stands for its table
    return data


def _dotted(keys: Sequence[Key]) -> str:
    return ".".join(map(str, keys))


def _join(source: str, keys: Sequence[Key]) -> str:
    return f"{source}: {_dotted(keys)}" if keys else source


def _type_at(keys: Sequence[Key], data: Any) -> msgspec.inspect.Type:
    """The declared type at a path of `data`; `AnyType` where the path leaves what is declared."""
    at: msgspec.inspect.Type = msgspec.inspect.type_info(RunConfig)
    for depth, key in enumerate(keys, 1):
        whole, options = at, _options(at, data)
        at = options[0]
        if _tag(at) is not None and at.tag_field == key:
            at = msgspec.inspect.LiteralType(tuple(_tag(t) for t in _options(whole, None)))
        elif isinstance(at, msgspec.inspect.StructType):
            at = next((f.type for f in at.fields if f.encode_name == key), msgspec.inspect.AnyType())
        elif isinstance(at, msgspec.inspect.DictType):
            at = at.value_type
        else:
            at = getattr(at, "item_type", msgspec.inspect.AnyType())
        if tuple(keys[:depth]) in OVERRIDES:
            at = msgspec.inspect.type_info(TrainConfig)
        data = _below(data, key)
    return at


def _below(data: Any, key: Key) -> Any:
    if isinstance(data, dict):
        return data.get(key)
    return data[key] if isinstance(data, list) and isinstance(key, int) and key < len(data) else None


def _options(at: msgspec.inspect.Type, data: Any) -> list[Any]:
    """What may stand at a place, None aside; of tables that are told apart by the value of a key, the one that `data`
    is."""
    options = [t for t in getattr(at, "types", (at,)) if not isinstance(t, msgspec.inspect.NoneType)]
    return [
        t for t in options if isinstance(data, dict) and _tag(t) is not None and data.get(t.tag_field) == t.tag
    ] or options


def _tag(kind: msgspec.inspect.Type) -> Any:
    return kind.tag if isinstance(kind, msgspec.inspect.StructType) else None


def _fields(keys: Sequence[Key], data: Any) -> set[str]:
    """The keys that the table at a path of `data` may have."""
    at = _type_at(keys, data)
    for key in keys:
        data = _below(data, key)
    tables = [t for t in _options(at, data) if isinstance(t, msgspec.inspect.StructType)]
    return {f.encode_name for t in tables for f in t.fields} | {t.tag_field for t in tables if t.tag_field is not None}


_WORDS = {
    msgspec.inspect.IntType: "an integer",
    msgspec.inspect.FloatType: "a number",
    msgspec.inspect.StrType: "a string",
    msgspec.inspect.BoolType: "true or false",
    msgspec.inspect.DictType: "a table",
    msgspec.inspect.StructType: "a table",
}


def _described(keys: Sequence[Key], data: Any) -> str:
    """The declared type at a path of `data` in words."""
    return _in_words(_type_at(keys, data))


def _in_words(kind: msgspec.inspect.Type) -> str:
    if isinstance(kind, msgspec.inspect.UnionType):
        words = (_in_words(t) for t in kind.types if not isinstance(t, msgspec.inspect.NoneType))
        return " or ".join(dict.fromkeys(words))
    if isinstance(kind, msgspec.inspect.LiteralType):
        return "one of " + ", ".join(json.dumps(v) for v in kind.values)
    item = getattr(kind, "item_type", None)
    if item is not None:
        return f"a list of: {_in_words(item)}"
    return _WORDS.get(type(kind), "another value")


def _advice(name: str, keys: Sequence[Key], known: set[str]) -> str:
    """The key that was probably meant: a close name in the same table, or the same name in another section."""
    elsewhere = [section for section in RunConfig.__struct_fields__ if name in _fields((section,), None)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.85 if elsewhere else 0.6)
    if close:
        return f"do you mean {_dotted((*keys, close[0]))}?"
    return f"do you mean {elsewhere[0]}.{name}?" if elsewhere else "remove it"
