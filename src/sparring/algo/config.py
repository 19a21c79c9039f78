"""Configuration of the algorithm: `[algo]` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, Any, Literal, get_args

import msgspec

from sparring.algo.aggregation import Aggregation
from sparring.algo.base import name_of
from sparring.algo.correction.presets import CORRECTIONS
from sparring.algo.correction.rule import Correction
from sparring.algo.credit.base import BaseCredit
from sparring.algo.filter.difficulty import Difficulty
from sparring.algo.gate.base import BaseGate
from sparring.algo.kl import Kl
from sparring.algo.own_loss import BaseLoss
from sparring.algo.presets import ALGORITHMS
from sparring.algo.right_answers import RightAnswers
from sparring.algo.rules import (
    DEFAULT_CREDIT,
    DEFAULT_GATE,
    DEFAULT_RATIO,
    RULES,
    RULES_BY_KEY,
    CreditRule,
    GateRule,
    RatioRule,
    ShapingRule,
)
from sparring.algo.shaping.base import BaseShaping
from sparring.algo.shaping.kl_reward import KlReward
from sparring.algo.tokens import StepGate, Unit
from sparring.algo.user_rules import class_of, is_from_file, is_own
from sparring.annotations import Annotation
from sparring.errors import refusal
from sparring.validation import InvalidValue

INEXACT: dict[str, Any] = {"correction": Correction(weight="token"), "anchor": "proximal"}
"""Settings that `correction = "auto"` takes for an engine that does not compute as the trainer does."""


OWN: Mapping[str, type[Any]] = {
    "credit": BaseCredit,
    "gate": BaseGate,
    "loss": BaseLoss,
    "shaping": BaseShaping,
    "correction": Correction,
}
"""Parts whose rule may come from a user's file (`file.py:Class`), each with the base of such classes."""


def _or_own(part: str) -> msgspec.Meta:
    """Declare that the rule of a part may also come from a user's file."""
    return msgspec.Meta(extra={"class_of": class_of(OWN[part])})


class AlgoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of the algorithm: the credit rule, ratio, gate, correction and aggregation that turn scores into
    advantages and losses.

    Credit, ratio, gate and correction are chosen by name, `gate = "cispo"`, or by a table with settings,
    `gate = { name = "cispo", high = 0.4 }`; a table without a name sets the default rule. docs/algorithms/ lists the
    names. A rule of your own is `file.py:Class`: docs/extend/credit-rule.md.
    """

    preset: str = ""
    """Name of an algorithm, such as "gspo", which sets every key that the recipe does not."""

    credit: Annotated[CreditRule, _or_own("credit")] = DEFAULT_CREDIT
    """Rule that turns a rollout's reward into an advantage per token."""

    ratio: RatioRule = DEFAULT_RATIO
    """Unit over which the probability ratio is formed: token, turn or sequence."""

    gate: Annotated[GateRule, _or_own("gate")] = DEFAULT_GATE
    """Surrogate objective as a function of ratio and advantage, such as PPO's clip."""

    loss: Annotated[BaseLoss | None, _or_own("loss")] = None
    """Surrogate of your own, `file.py:Class`, in the place of ratio and gate. Correction, KL penalty, entropy and
    aggregation stay as they are."""

    anchor: Literal["behaviour", "proximal", "loglinear"] = "behaviour"
    """Denominator of the ratio. behaviour: the log-probability that the engine recorded; proximal: the trainer's own
    before the update; loglinear: an interpolation between the recorded and the current one, which needs no forward
    pass."""

    correction: Annotated[Correction | Literal["auto"], _or_own("correction")] = "auto"
    """Correction for an engine whose probabilities differ from the trainer's. auto: none if engine and numerics are
    exact, otherwise tis with the anchor proximal."""

    aggregation: Aggregation = "token_mean"
    """Weights with which token losses are averaged."""

    max_tokens: int = 0
    """Constant length that aggregation "constant" divides by; 0 takes `rollout.sampling.max_turn_tokens`."""

    kl: Kl = Kl()
    """KL penalty against a reference model, in the loss."""

    entropy_bonus: float = 0.0
    """Coefficient of the mean entropy, which is added to the objective."""

    top_entropy: float = 1.0
    """Share of an optimiser step's tokens that the surrogate uses, those with the highest entropy; 0.2 is the 80/20
    rule (arXiv 2506.01939). Below 1 it costs a first pass over the step's tokens."""

    right_answers: RightAnswers | None = None
    """Language-model loss on right answers, added to the policy loss."""

    shaping: tuple[Annotated[ShapingRule, _or_own("shaping")], ...] = ()
    """Changes of rewards before credit, applied in this order: a list of tables, each with the name of a rule and its
    settings."""

    kl_reward: KlReward | None = None
    """KL penalty against a reference model, in the reward of each token."""

    difficulty: Difficulty | None = None
    """Filter that trains only groups whose share of solved rollouts lies in a range."""

    zero_variance_filter: bool = False
    """Drop groups whose rewards are all equal, or give no advantage under the credit rule, so that the mean is over the
    other groups (DAPO). Without it they count in the denominator; they are computed only if something other than the
    advantage, such as a KL penalty, gives their tokens a gradient."""

    control: Literal["none", "shuffled"] = "none"
    """`shuffled` permutes the rewards over all rollouts of an update: a control experiment, which must learn
    nothing."""

    def __post_init__(self) -> None:
        if self.preset and self.preset not in ALGORITHMS:
            raise ValueError(f"preset must be one of {', '.join(sorted(ALGORITHMS))}, got {self.preset!r}")
        rule = self.correction_rule
        if self.anchor == "behaviour" and rule.weight != "none" and not rule.metrics_only:
            raise ValueError(
                'anchor must be "proximal" with a correction that has weights, '
                f"got {self.anchor!r} and {rule.weight!r}: "
                "a ratio to the engine's log-probabilities is already importance-weighted"
            )
        if self.max_tokens < 0 or not self.entropy_bonus >= 0:
            raise ValueError("max_tokens and entropy_bonus must be 0 or more")
        if self.max_tokens and self.aggregation != "constant":
            raise ValueError(
                f'max_tokens must be 0 unless aggregation = "constant", got {self.max_tokens} with "{self.aggregation}"'
            )
        if not 0 < self.top_entropy <= 1:
            raise ValueError(f"top_entropy must lie above 0 and at most at 1, got {self.top_entropy}")
        if self.kl.target is not None and self.kl_reward is not None and self.kl_reward.target is not None:
            raise ValueError("kl_reward.target must be left out with kl.target: only one coefficient can adapt")
        if is_from_file(rule) and rule.does_nothing:
            raise ValueError('correction must set weight, the unit of its weights, such as "token"')
        self._check_ratio()

    def _check_ratio(self) -> None:
        if type(self.loss) is BaseLoss:
            raise ValueError('loss must have a name, "file.py:Class"')
        if self.loss is not None and (self.ratio, self.gate) != (DEFAULT_RATIO, DEFAULT_GATE):
            raise ValueError("ratio and gate must be left out with a loss, which takes their place")
        if self.ratio.kind in self.gate.takes:
            return
        gate, ratio = name_of(self.gate), name_of(self.ratio)
        all_ratios: tuple[type[RatioRule], ...] = get_args(RatioRule)
        all_gates: tuple[type[GateRule], ...] = get_args(GateRule)
        ratios = " or ".join(f'"{name_of(rule)}"' for rule in all_ratios if rule.kind in self.gate.takes)
        gates = ", ".join(name_of(rule) for rule in all_gates if self.ratio.kind in rule.takes)
        raise ValueError(
            f'ratio must be {ratios} with the gate "{gate}", got "{ratio}"; gates that take "{ratio}": {gates}'
        )

    @property
    def correction_rule(self) -> Correction:
        """Return the correction rule; a rule without effect while `correction` is "auto"."""
        return Correction() if isinstance(self.correction, str) else self.correction

    @property
    def sees_one_group(self) -> bool:
        """Return whether an advantage can be computed from its recorded group alone."""
        return self.credit.sees_one_group and self.control == "none" and self.kl_reward is None

    @property
    def needs_reference(self) -> bool:
        """Return whether the update needs a reference model."""
        return bool(self.kl.coefficient or self.kl_reward or self.reads(Annotation.REFERENCE))

    @property
    def compares_whole(self) -> bool:
        """Return whether the policy term computes the exact KL over the vocabulary."""
        return bool(self.kl.coefficient) and self.kl.estimator == "full"

    @property
    def reads_reference(self) -> bool:
        """Return whether the update reads the reference's log-probabilities of the sampled tokens."""
        estimated = bool(self.kl.coefficient) and (self.kl.estimator != "full" or self.kl.target is not None)
        return estimated or self.kl_reward is not None or self.reads(Annotation.REFERENCE)

    def reads(self, name: str) -> bool:
        """Return whether the credit rule reads this annotation."""
        return name in self.credit.reads

    @property
    def adaptive(self) -> Kl | KlReward:
        """Return the KL penalty whose coefficient may adapt."""
        return self.kl_reward if self.kl_reward is not None and self.kl.target is None else self.kl

    @property
    def needs_proximal(self) -> bool:
        """Return whether the update needs the trainer's log-probabilities from before it."""
        rule = self.correction_rule
        return self.anchor != "behaviour" or not rule.does_nothing and rule.compare == "before"

    @property
    def unit(self) -> Unit:
        """Return the largest unit of any part; tokens of one unit have to be in one micro-batch."""
        surrogate = {self.ratio.unit, self.gate.unit} if self.loss is None else {self.loss.unit}
        units = surrogate | set(self.correction_rule.units)
        return next(unit for unit in ("sequence", "turn", "token") if unit in units)

    @property
    def needs_survey(self) -> bool:
        """Return whether a token's loss depends on all tokens of its optimiser step."""
        return isinstance(self.gate, StepGate) or self._depends_on_step

    @property
    def needs_idle_tokens(self) -> bool:
        """Return whether tokens with an advantage of 0 affect the gradient of any token in their row."""
        return self.needs_idle_rows or self.unit != "token" or self.needs_survey

    @property
    def needs_idle_rows(self) -> bool:
        """Return whether rows whose advantages are all 0 affect the gradient; if not, such rows are not computed."""
        surrogate = self.gate if self.loss is None else self.loss
        return bool(self.kl.coefficient or self.entropy_bonus or surrogate.moves_idle_tokens or self._depends_on_step)

    @property
    def _depends_on_step(self) -> bool:
        """Return whether anything but the gate depends on all tokens of the optimiser step."""
        rule = self.correction_rule
        return self.top_entropy < 1 or rule.normalise or rule.denominator == "kept"

    def check(self, group_size: int, annotations: Set[Annotation]) -> None:
        """Refuse a credit rule that cannot work with this group size and these annotations, and a filter that would
        drop every group (`BadInput`)."""
        self.credit.check(group_size, annotations)
        self._check_rewards()
        if group_size < 2 and self.zero_variance_filter:
            expected = "false with rollout.group_size = 1, where it would drop every group"
            raise refusal("algo.zero_variance_filter", expected, "true", "set it to false, or raise rollout.group_size")

    def _check_rewards(self) -> None:
        """Refuse changes of the reward that the credit rule does not read, or does not allow."""
        credit = name_of(self.credit)
        if self.kl_reward is not None and not self.credit.counts_token_rewards:
            fix = "set algo.kl.coefficient, a penalty in the loss, or choose another credit"
            raise refusal("algo.kl_reward", "a credit that reads per-token rewards", repr(credit), fix)
        if self.credit.needs_nonnegative_rewards and (self.shaping or self.kl_reward is not None):
            actual, fix = (
                "shaping or kl_reward, which may make rewards negative",
                "leave these out, or choose another credit",
            )
            raise refusal("algo.credit", f"rewards of at least 0 with {credit!r}", actual, fix)
        for rule in self.shaping[1:]:
            if rule.needs_nonnegative_rewards:
                actual, fix = "another rule before it, which may make rewards negative", "write it first"
                raise refusal(f"algo.shaping {name_of(rule)}", "rewards of at least 0", actual, fix)
        unread = self.credit.unread([name_of(rule) for rule in self.shaping])
        if unread:
            fix = f"give {unread[0]} a weight in algo.credit.weights, or leave it out"
            raise refusal(
                "algo.shaping",
                f"rules that algo.credit.weights names, because {credit!r} reads parts of the score, not the sum",
                unread[0],
                fix,
            )


def named(algo: Any) -> Any:
    """Return `[algo]` with its preset's keys filled in and every part as a table with its name. Invalid values stay,
    for the config to refuse."""
    if not isinstance(algo, Mapping):
        return algo
    explicit = {key: _as_table(key, value) for key, value in algo.items()}
    preset = str(explicit.get("preset", ""))
    if preset:
        _check_name("preset", preset, ALGORITHMS)
    replaced = ("ratio", "gate") if "loss" in explicit else ()
    filled = {key: _as_table(key, value) for key, value in ALGORITHMS.get(preset, {}).items() if key not in replaced}
    for key, value in explicit.items():
        base = filled.get(key)
        _refuse_foreign_keys(key, value, base, preset)
        # a name replaces the preset's part; a table changes its settings
        if (
            isinstance(algo[key], Mapping)
            and isinstance(base, Mapping)
            and value.get("name", base.get("name")) == base.get("name")
        ):
            value = {**base, **value}
        filled[key] = value
    correction = filled.get("correction")
    if (
        isinstance(correction, Mapping)
        and (correction.get("weight", "none") != "none" or is_own(correction.get("name")))
        and not correction.get("metrics_only")
    ):
        filled.setdefault("anchor", "proximal")
    _refuse_whole_reward(filled.get("kl_reward"))
    return {key: _with_name(key, value) for key, value in filled.items()}


def _as_table(key: str, value: Any) -> Any:
    if isinstance(value, str) and (key in RULES or key == "loss" or is_own(value)):
        return {"name": value}
    if key == "correction" and isinstance(value, str) and value != "auto":
        return CORRECTIONS[_check_name(key, value, CORRECTIONS, "auto")]
    return value


def _with_name(key: str, value: Any) -> Any:
    if key not in RULES or not isinstance(value, Mapping):
        return value
    name = value.get("name", name_of(RULES[key]))
    if is_own(name):
        return value
    return {**value, "name": _check_name(key, name, [name_of(rule) for rule in RULES_BY_KEY[key]])}


def _refuse_foreign_keys(key: str, value: Any, base: Any, preset: str) -> None:
    """Refuse settings that a part's rule does not have. Only for a part that names no rule, so that the preset or the
    default chose it."""
    if key not in RULES or not isinstance(value, Mapping) or "name" in value:
        return
    chosen = base["name"] if isinstance(base, Mapping) else name_of(RULES[key])
    rule = next(rule for rule in RULES_BY_KEY[key] if name_of(rule) == chosen)
    keys = [field.name for field in msgspec.structs.fields(rule)]
    foreign = [name for name in value if name not in keys]
    if foreign:
        rule_of = (
            f"the {key} {chosen!r} of preset {preset!r}"
            if isinstance(base, Mapping)
            else f"the default {key} {chosen!r}"
        )
        what = f"a key of {rule_of}: {', '.join(sorted(keys))}" if keys else f"no key: {rule_of} has none"
        raise InvalidValue(("algo", key, foreign[0]), what, repr(foreign[0]))


def _refuse_whole_reward(price: Any) -> None:
    if isinstance(price, Mapping) and price.get("estimator") == "full":
        why = "which is the same for every sampled token and so rewards none of them"
        fix = 'set algo.kl.estimator = "full" instead, a penalty in the loss'
        raise InvalidValue(("algo", "kl_reward", "estimator"), "one of k1, k2, k3, abs", f"'full', {why}", fix)


def _check_name(key: str, name: Any, *names: Any) -> Any:
    """Return the name; refuse one that is not among `names`."""
    allowed = [choice for group in names for choice in ([group] if isinstance(group, str) else group)]
    if name not in allowed:
        raise InvalidValue(("algo", key), f"one of {', '.join(sorted(allowed))}", repr(name))
    return name
