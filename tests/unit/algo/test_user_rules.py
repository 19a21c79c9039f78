"""Rules in files of the user's own: in recipes, records and other processes, and their trial before a run."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from refusals import refused_at

from sparring.algo.pipeline import load_credit
from sparring.algo.user_rules import record
from sparring.batch.plain_groups import nouns, simple_group
from sparring.errors import BadInput
from sparring.recipe.load import from_data, load_recorded
from sparring.recipe.run_config import RunConfig, dump
from sparring.stages.preflight.own_rules import check_own_rules

RULES = """
import torch
from dataclasses import replace
from typing import ClassVar
from amounts import HALF
from sparring.algo.correction.rule import Correction
from sparring.algo.credit.base import BaseCredit
from sparring.algo.gate.base import BaseGate
from sparring.algo.own_loss import BaseLoss
from sparring.algo.shaping.base import BaseShaping
from sparring.algo.shaping.amounts import shaped
from sparring.algo.tokens import Gated


class Lowest(BaseCredit, frozen=True, kw_only=True):
    least_members: ClassVar[int] = 2
    scale: float = 1.0

    def advantages(self, members):
        lowest = min(member.reward for member in members)
        return [self.scale * (member.reward - lowest) for member in members]

class NotFinite(Lowest, frozen=True, kw_only=True):
    def advantages(self, members):
        return [float("nan") for _ in members]

class TooFew(Lowest, frozen=True, kw_only=True):
    def credit(self, groups, samples):
        return [rows[1:] for rows in super().credit(groups, samples)]

class ByPlace(Lowest, frozen=True, kw_only=True):
    def credit(self, groups, samples):
        scored = super().credit(groups, samples)
        return scored[:1] + [[replace(row, advantages=tuple(2 * x for x in row.advantages)) for row in rows]
                             for rows in scored[1:]]

class ReadsFailed(Lowest, frozen=True, kw_only=True):
    def credit(self, groups, samples):
        return [rows if not group.failed else [] for group, rows in zip(groups, super().credit(groups, samples))]

class Raises(Lowest, frozen=True, kw_only=True):
    def advantages(self, members):
        return members[0].no_such_field

class Halved(BaseShaping, frozen=True, kw_only=True):
    def shape(self, groups):
        return [shaped(group, "halved", lambda trajectories, rewards: [HALF * r - r for r in rewards]) for group in groups]

class Reversed(BaseShaping, frozen=True, kw_only=True):
    def shape(self, groups):
        return list(groups)[::-1]

class Tanh(BaseGate, frozen=True, kw_only=True):
    unit: ClassVar = "token"
    def __call__(self, log_ratio, tokens):
        return Gated(surrogate=log_ratio.tanh() * tokens.advantages, stopped=log_ratio.detach() > 1)

class Cispo(BaseLoss, frozen=True, kw_only=True):
    def __call__(self, tokens):
        with torch.no_grad():
            weights = tokens.log_ratio.exp().clamp(max=1.2)
        return -weights * tokens.advantages * tokens.logprob * tokens.log_ratio.detach().exp()

class Idle(BaseLoss, frozen=True, kw_only=True):
    def __call__(self, tokens):
        return -(tokens.advantages + 1) * tokens.logprob

class Scalar(BaseLoss, frozen=True, kw_only=True):
    def __call__(self, tokens):
        return -(tokens.advantages * tokens.logprob).sum()

class Flat(BaseLoss, frozen=True, kw_only=True):
    def __call__(self, tokens):
        return -(tokens.advantages * tokens.logprob).detach()

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * x
    @staticmethod
    def backward(context, gradient):
        return gradient

class WrongGradient(BaseLoss, frozen=True, kw_only=True):
    def __call__(self, tokens):
        return Wrong.apply(tokens.logprob) * tokens.advantages

class ByUnit(BaseLoss, frozen=True, kw_only=True):
    # float32 by hand, tensors of the default dtype, and constants changed in place are as right as any
    unit: ClassVar = "sequence"
    @torch.no_grad()
    def cap(self, tokens):
        weights = (tokens.logprob - tokens.anchor).exp_()
        weights[weights > 1.2] = 1.2
        return weights.mul_(2).to(torch.float32)
    def __call__(self, tokens):
        totals = torch.zeros(int(tokens.sequences.max()) + 1).index_add_(0, tokens.sequences, tokens.logprob.float())
        return -self.cap(tokens) * tokens.log_ratio.data * tokens.advantages * totals[tokens.sequences]

class OwnBackward(BaseLoss, frozen=True, kw_only=True):
    def __call__(self, tokens):
        return Right.apply(tokens.logprob) * tokens.advantages

class Right(Wrong):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(context, gradient):
        [x] = context.saved_tensors
        return 2 * x * gradient

class ForgetsUnit(BaseLoss, frozen=True, kw_only=True):
    def __call__(self, tokens):
        return -tokens.advantages * tokens.mean(tokens.log_ratio, "sequence").exp()

class ByBatch(ForgetsUnit, frozen=True, kw_only=True):
    unit: ClassVar = "sequence"
    def __call__(self, tokens):
        return -tokens.advantages / (1 + tokens.advantages.abs().mean()) * tokens.logprob

class IdleRows(BaseLoss, frozen=True, kw_only=True):
    unit: ClassVar = "sequence"
    def __call__(self, tokens):
        return -(tokens.advantages + 1) * tokens.mean(tokens.logprob, "sequence")

class Changes(BaseLoss, frozen=True, kw_only=True):
    def __call__(self, tokens):
        return -tokens.advantages.mul_(2) * tokens.logprob

class Noisy(BaseLoss, frozen=True, kw_only=True):
    def __call__(self, tokens):
        return -tokens.advantages * tokens.logprob * torch.rand(len(tokens.logprob))

class HasDigest(BaseLoss, frozen=True, kw_only=True):
    digest: str = "mine"

class NeverStops(BaseGate, frozen=True, kw_only=True):
    def __call__(self, log_ratio, tokens):
        return Gated(surrogate=log_ratio * tokens.advantages, stopped=tokens.weighted[:1])

class ByDeviation(Lowest, frozen=True, kw_only=True):
    def advantages(self, members):
        rewards = [member.reward for member in members]
        return [(reward - min(rewards)) / (max(rewards) - min(rewards)) for reward in rewards]

class ByOthers(Lowest, frozen=True, kw_only=True):
    def advantages(self, members):
        total = sum(member.reward for member in members)
        return [member.reward - (total - member.reward) / (len(members) - 1) for member in members]

class Counts(Lowest, frozen=True, kw_only=True):
    def advantages(self, members):
        CALLS.append(1)
        return [member.reward * len(CALLS) for member in members]

class Keeps(Lowest, frozen=True, kw_only=True):
    def advantages(self, members):
        members[0].score.parts["seen"] = 1.0
        return super().advantages(members)

CALLS = []

class Root(Correction, frozen=True, kw_only=True):
    def raw_weights(self, difference, tokens):
        return (HALF * difference).exp()

class Live(Correction, frozen=True, kw_only=True):
    def __call__(self, old, tokens):
        corrected = super().__call__(old, tokens)
        corrected.weights = tokens.logprob.exp()
        return corrected

not_a_class = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "amounts.py").write_text("HALF = 0.5\n")
    (tmp_path / "rules.py").write_text(RULES)
    return tmp_path / "rules.py"


def config_of(algo: Mapping[str, Any]) -> RunConfig:
    return from_data(
        {
            "run": {"name": "own"},
            "models": {"policy": {"path": "model"}},
            "env": {"name": "world.py:World"},
            "algo": dict(algo),
        },
        "recipe.toml",
    )


def tried(algo: Mapping[str, Any], group_size: int = 4) -> list[str]:
    return check_own_rules(config_of(algo).algo, group_size)


def test_every_part_takes_one_and_a_recipe_says_it_whole(file: Path) -> None:
    algo = {
        "credit": {"name": f"{file}:Lowest", "scale": 2.0},
        "shaping": [{"name": f"{file}:Halved"}, {"name": "overlong"}],
        "loss": f"{file}:Cispo",
        "correction": {"name": f"{file}:Root", "weight": "token"},
    }
    config = config_of(algo)
    assert (config.algo.credit.scale, config.algo.anchor) == (2.0, "proximal")  # type: ignore[union-attr]
    assert dump(config_of(algo)) == dump(config)
    assert [fact.split(" was ")[0] for fact in tried(algo)] == [
        f"algo.{part}: {file}:{name}"
        for part, name in (("credit", "Lowest"), ("loss", "Cispo"), ("correction", "Root"), ("shaping", "Halved"))
    ]
    assert all(tried({"preset": "gspo", "loss": f"{file}:{name}"}) for name in ("ByUnit", "OwnBackward"))
    assert all(
        tried({"credit": f"{file}:{name}", "zero_variance_filter": True}) for name in ("ByOthers", "ByDeviation")
    )
    assert tried({"gate": f"{file}:Tanh"}) and not tried({"credit": "rloo", "gate": "cispo"})


def test_a_run_records_the_files_and_reads_them_when_they_have_changed(file: Path, tmp_path: Path) -> None:
    config, folder = config_of({"credit": f"{file}:Lowest"}), tmp_path / "run"
    record(folder, config.algo)
    (folder / "config.toml").write_text(dump(config))
    file.write_text(RULES.replace("min(", "max("))
    changed = config_of({"credit": f"{file}:Lowest"})
    assert changed.algo.credit != config.algo.credit and "digest" in str(changed.algo.credit)
    file.unlink()
    text = "from sparring.recipe.load import load_recorded; import sys; print(load_recorded(sys.argv[1]).algo.credit)"
    ran = subprocess.run(
        [sys.executable, "-c", text, str(folder / "config.toml")], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == str(config.algo.credit)
    assert load_recorded(folder / "config.toml") == config
    file.write_text(RULES + "\n")
    with refused_at("recipe.toml: algo.credit.digest", "got"):
        config_of({"credit": {"name": f"{file}:Lowest", "digest": "0" * 32}})


def test_another_process_gets_the_files_with_the_rule(file: Path) -> None:
    """Of a link, and a file that is imported late, too."""
    (link := file.with_name("linked.py")).symlink_to(file)
    (file.parent / "late.py").write_text("SCALE = 3.0\n")
    file.write_text(RULES.replace("        lowest =", "        from late import SCALE\n        lowest = SCALE *"))
    config = config_of(
        {"credit": {"name": f"{link}:Lowest", "scale": 0.25}, "correction": {"name": f"{file}:Root", "weight": "token"}}
    )
    data = pickle.dumps(config.algo)
    record(file.parent / "run", config.algo)
    kept = {path.name for path in file.parent.joinpath("run").rglob("*.py")}
    assert kept == {"rules.py", "linked.py", "amounts.py", "late.py"}
    for path in file.parent.glob("*.py"):
        path.unlink()
    text = """
import pickle, sys
from sparring.stages.preflight.own_rules import check_own_rules
algo = pickle.load(sys.stdin.buffer)
check_own_rules(algo, 4)
print(algo.credit, algo.correction)
"""
    ran = subprocess.run([sys.executable, "-c", text], input=data, capture_output=True, check=True)
    assert ran.stdout.decode().strip() == f"{config.algo.credit} {config.algo.correction}"


def test_an_error_in_an_update_names_the_rule(file: Path) -> None:
    algo = config_of({"credit": f"{file}:Raises"}).algo
    with refused_at("[algo]", f"{file}:Raises to compute an update"):
        load_credit(algo, seed=0).credit(*nouns([simple_group([0.0, 1.0])]))


@pytest.mark.parametrize(
    ("algo", "where", "words"),
    [
        ({"credit": "FILE:Cispo"}, "algo.credit", "a subclass of sparring.algo.credit.base.BaseCredit"),
        ({"credit": "FILE:NoSuch"}, "algo.credit", "a name defined in"),
        ({"credit": "FILE:not_a_class"}, "algo.credit", "a class of a rule"),
        ({"credit": "nowhere.py:Lowest"}, "algo.credit", "a Python file nowhere.py"),
        ({"credit": {"name": "FILE:Lowest", "scales": 1}}, "algo.credit.scales", "an unknown key"),
        ({"loss": "clip"}, "algo.loss", "file.py:Class"),
        ({"loss": {}}, "algo", "file.py:Class"),
        ({"loss": "FILE:Cispo", "gate": "cispo"}, "algo", "takes their place"),
        ({"credit": "FILE:NotFinite"}, "algo.credit", "finite numbers for group-0/0/policy"),
        ({"credit": "FILE:TooFew"}, "algo.credit", "all rows of each group, or none"),
        ({"credit": "FILE:ByPlace"}, "algo.credit", "groups in another order"),
        ({"credit": "FILE:ReadsFailed"}, "algo.credit", "whatever rollouts failed"),
        ({"credit": "FILE:Raises"}, "algo.credit", "no_such_field"),
        ({"shaping": [{"name": "FILE:Reversed"}]}, "algo.shaping", "to return groups"),
        ({"credit": "FILE:Counts"}, "algo.credit", "the same in a second call"),
        ({"credit": "FILE:Keeps"}, "algo.credit", "leave its input as it is"),
        ({"credit": "FILE:ByDeviation"}, "algo.credit", "ZeroDivisionError"),
        ({"credit": "FILE:ByOthers"}, "algo.credit", "one group has a single rollout"),
        ({"gate": "FILE:NeverStops"}, "algo.gate", "stopped has shape [1], surrogate [24]"),
        ({"loss": "FILE:ForgetsUnit"}, "algo.loss", 'unit = "sequence"'),
        ({"loss": "FILE:ByBatch"}, "algo.loss", "give a sequence the same beside any others"),
        ({"loss": "FILE:IdleRows"}, "algo.loss", "moves_idle_tokens = True"),
        ({"loss": "FILE:Changes"}, "algo.loss", "another tokens.advantages"),
        ({"loss": "FILE:Noisy"}, "algo.loss", "the same in a second call"),
        ({"loss": "FILE:HasDigest"}, "algo.loss", "without a field `digest`"),
        ({"correction": "FILE:Root"}, "algo", "correction must set weight"),
        ({"loss": "FILE:Scalar"}, "algo.loss", "24 finite numbers"),
        ({"loss": "FILE:Flat"}, "algo.loss", "depend on tokens.logprob"),
        ({"loss": "FILE:Idle"}, "algo.loss", "moves_idle_tokens = True"),
        ({"loss": "FILE:WrongGradient"}, "algo.loss", "the gradient of its values"),
        ({"correction": {"name": "FILE:Live", "weight": "token"}}, "algo.correction", "without gradient"),
    ],
)
def test_a_wrong_one_is_refused_before_the_run(file: Path, algo: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(BadInput) as raised:
        tried(tomllib.loads(tomli_w.dumps(algo).replace("FILE", str(file))))
    assert where in str(raised.value) and words in str(raised.value), raised.value
