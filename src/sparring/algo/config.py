"""Configuration of the algorithm: `[algo]` of a recipe."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Set
from typing import Any, ClassVar, Literal

import msgspec

from sparring.algo.aggregation import Aggregation
from sparring.algo.correction.presets import CORRECTIONS
from sparring.algo.correction.rule import Correction
from sparring.algo.credit.gdpo import Gdpo
from sparring.algo.credit.maxrl import MaxRl
from sparring.algo.credit.rules import (
    BLIND_TO_TOKENS,
    OF_ONE_GROUP,
    READS,
    CreditRule,
    Grpo,
    name_of,
    refuse_annotations,
    refuse_group_size,
)
from sparring.algo.facts import Facts
from sparring.algo.filter.difficulty import Difficulty
from sparring.algo.gate.rules import Clip, ClipCov, GateRule, Geometric, KlCov, KlMask, M2po, Topr, TvMask, Vespo
from sparring.algo.kl import Kl
from sparring.algo.presets import ALGORITHMS
from sparring.algo.ratio.rules import ProductRatio, RatioRule, TokenRatio
from sparring.algo.right_answers import RightAnswers
from sparring.algo.shaping.kl_reward import KlReward
from sparring.algo.shaping.rules import ShapingRule
from sparring.algo.shaping.stop_properly import StopProperly
from sparring.algo.tokens import StepGate, Unit
from sparring.errors import refusal
from sparring.validation import InvalidValue


def rules(union: Any) -> tuple[type[msgspec.Struct], ...]:
    """The rules of a part, in the order of their union."""
    return typing.get_args(union) or (union,)


RULES: dict[str, msgspec.Struct] = {"credit": Grpo(), "ratio": TokenRatio(), "gate": Clip()}
"""The parts that are chosen by name, and which of them is taken where none is named."""

RULES_BY_KEY = {"credit": rules(CreditRule), "ratio": rules(RatioRule), "gate": rules(GateRule)}
"""All that can be named."""

OF_TOKENS = (TvMask, KlMask, Geometric, ClipCov, KlCov, M2po)
"""Gates that look at each token's own ratio."""

OF_PRODUCTS = (Vespo, Topr)
"""Gates that can take the ratio of a whole sequence, which no fixed range around 1 holds and whose gradient grows with
the length: they take it as a weight."""

INEXACT: dict[str, Any] = {"correction": Correction(weight="token"), "anchor": "proximal"}
"""What `correction = "auto"` is where the engine does not compute as the trainer does."""


class AlgoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How scores become advantages and losses: an algorithm is a credit rule, a ratio, a gate, a correction and an
    aggregation.

    Credit, ratio, gate and correction are chosen by name, `gate = "cispo"`, or by a table with settings,
    `gate = { name = "cispo", high = 0.4 }`; a table without a name has settings of the default. docs/algorithms.md
    lists the names.
    """

    facts: ClassVar[Facts] = Facts(
        source="the parts, each with a source of its own",
        defaults={
            "preset": "off",
            "credit": "arXiv 2402.03300",
            "ratio": "arXiv 1707.06347",
            "gate": "arXiv 2503.14476",
            "anchor": "ours: with an exact engine what was recorded is what the trainer computes",
            "correction": "ours: see `auto`",
            "aggregation": "DAPO's code (verl's token-mean)",
            "max_tokens": "ours; Dr. GRPO takes the largest length of an answer",
            "kl": "arXiv 2503.14476, section 2.3: none",
            "entropy_bonus": "off",
            "top_entropy": "off",
            "right_answers": "off",
            "shaping": "off",
            "kl_reward": "off",
            "difficulty": "off",
            "zero_variance_filter": "off: equation 3 of arXiv 2402.03300 divides by all; DAPO's presets set it",
            "control": "off",
        },
        differences=(
            (
                "Without a preset the default is DAPO's clip and token mean with GRPO's credit, without DAPO's "
                "filter and its overlong punishment."
            ),
        ),
    )

    preset: str = ""
    """An algorithm by its name, such as "gspo": it fills in every key that is not given here."""

    credit: CreditRule = Grpo()
    """How a rollout's reward becomes the advantage of its tokens."""

    ratio: RatioRule = TokenRatio()
    """What one probability ratio belongs to."""

    gate: GateRule = Clip()
    """What is made of ratio and advantage."""

    anchor: Literal["behaviour", "proximal", "loglinear"] = "behaviour"
    """What the ratio is to. behaviour: what the engine recorded; proximal: the trainer's own log-probabilities before
    the update; loglinear: an estimate of these between recorded and current ones, which costs no forward."""

    correction: Correction | Literal["auto"] = "auto"
    """What is done about an engine whose probabilities are not the trainer's. auto: none where engine and numerics are
    exact, else tis with the anchor proximal."""

    aggregation: Aggregation = "token_mean"
    """What each token counts."""

    max_tokens: int = 0
    """The constant length of aggregation "constant", which alone reads it; 0 takes `rollout.max_turn_tokens`."""

    kl: Kl = Kl()
    """A penalty for leaving a reference."""

    entropy_bonus: float = 0.0
    """Coefficient of the mean entropy in what is maximised."""

    top_entropy: float = 1.0
    """The share of an optimiser step's tokens, those of highest entropy, that the surrogate is taken of; 0.2: the 80/20
    rule (arXiv 2506.01939). Below 1 it costs a first pass over the step's tokens."""

    right_answers: RightAnswers | None = None
    """A language-model loss on right answers, beside the policy's."""

    shaping: tuple[ShapingRule, ...] = ()
    """What is added to rewards before credit, in this order: a list of tables, each with the name of a rule and its
    settings."""

    kl_reward: KlReward | None = None
    """A price per token for leaving the reference, in the reward."""

    difficulty: Difficulty | None = None
    """Train only groups of which this share of rollouts succeeded."""

    zero_variance_filter: bool = False
    """Leave out groups whose rewards are all equal, or all alike to the credit rule, so that the mean is over the
    others (DAPO). Without it they count in the denominator, and are not computed unless something beside the advantage
    moves their tokens."""

    control: Literal["none", "shuffled"] = "none"
    """`shuffled` permutes the rewards over all rollouts of an update: an experiment's control, which must learn
    nothing."""

    def __post_init__(self) -> None:
        if self.preset and self.preset not in ALGORITHMS:
            raise ValueError(f"preset must be one of {', '.join(sorted(ALGORITHMS))}, got {self.preset!r}")
        rule = self.correction_rule
        if self.anchor == "behaviour" and rule.weight != "none" and not rule.metrics_only:
            raise ValueError(
                f'anchor must be "proximal" beside weights of a correction, got {self.anchor!r} and {rule.weight!r}: '
                "a ratio to what the engine recorded corrects already"
            )
        if self.max_tokens < 0 or not self.entropy_bonus >= 0:
            raise ValueError("max_tokens and entropy_bonus must be 0 or more")
        if self.max_tokens and self.aggregation != "constant":
            why = 'which "constant" alone reads'
            raise ValueError(
                f'max_tokens must be 0 beside aggregation = "{self.aggregation}", {why}, got {self.max_tokens}'
            )
        if not 0 < self.top_entropy <= 1:
            raise ValueError(f"top_entropy must lie above 0 and at most at 1, got {self.top_entropy}")
        if self.kl.target is not None and self.kl_reward is not None and self.kl_reward.target is not None:
            raise ValueError("kl_reward.target must be left out beside kl.target: one coefficient adapts")
        self._check_ratio()

    def _check_ratio(self) -> None:
        gate, ratio = (str(rule.__struct_config__.tag) for rule in (self.gate, self.ratio))
        if isinstance(self.gate, OF_TOKENS) and not isinstance(self.ratio, TokenRatio):
            raise ValueError(f'ratio must be "token" beside the gate "{gate}", which looks at tokens, got "{ratio}"')
        if isinstance(self.gate, Vespo) and not isinstance(self.ratio, ProductRatio):
            raise ValueError(
                f'ratio must be "product" beside the gate "vespo", which is of whole sequences, got "{ratio}"'
            )
        if isinstance(self.ratio, ProductRatio) and not isinstance(self.gate, OF_PRODUCTS):
            names = ", ".join(str(rule.__struct_config__.tag) for rule in OF_PRODUCTS)
            raise ValueError(
                f'gate must be one of {names} beside the ratio "product", which leaves fixed ranges, got "{gate}"'
            )

    @property
    def correction_rule(self) -> Correction:
        """The correction; of an unresolved config none."""
        return Correction() if isinstance(self.correction, str) else self.correction

    @property
    def sees_one_group(self) -> bool:
        """Whether an advantage depends on its group alone, as it is recorded."""
        return isinstance(self.credit, OF_ONE_GROUP) and self.control == "none" and self.kl_reward is None

    @property
    def needs_reference(self) -> bool:
        """Whether a reference's log-probabilities have a part in the update."""
        return bool(self.kl.coefficient or self.kl_reward or self.reads("reference"))

    @property
    def compares_whole(self) -> bool:
        """Whether the policy term compares whole distributions with the reference's."""
        return bool(self.kl.coefficient) and self.kl.estimator == "full"

    @property
    def reads_reference(self) -> bool:
        """Whether what the reference says of the sampled tokens is read."""
        estimated = bool(self.kl.coefficient) and (self.kl.estimator != "full" or self.kl.target is not None)
        return estimated or self.kl_reward is not None or self.reads("reference")

    def reads(self, name: str) -> bool:
        """Whether the credit rule reads this beside scores and what was recorded: see `rules.READS`."""
        return name in READS.get(type(self.credit), ())

    @property
    def adaptive(self) -> Kl | KlReward:
        """Of the two penalties for leaving the reference the one whose coefficient may adapt."""
        return self.kl_reward if self.kl_reward is not None and self.kl.target is None else self.kl

    @property
    def needs_proximal(self) -> bool:
        """Whether the trainer's log-probabilities before an update have a part in it."""
        rule = self.correction_rule
        return self.anchor != "behaviour" or not rule.does_nothing and rule.compare == "before"

    @property
    def unit(self) -> Unit:
        """What no micro-batch may split: the largest unit of any part."""
        units = {self.ratio.unit, self.gate.unit, *self.correction_rule.units}
        return next(unit for unit in ("sequence", "turn", "token") if unit in units)

    @property
    def needs_survey(self) -> bool:
        """Whether a token's part in the loss depends on all tokens of its optimiser step."""
        return isinstance(self.gate, StepGate) or self._looks_at_the_step

    @property
    def needs_idle_tokens(self) -> bool:
        """Whether tokens of no advantage have a part in the gradient, or in that of others of their row."""
        return self.needs_idle_rows or self.unit != "token" or self.needs_survey

    @property
    def needs_idle_rows(self) -> bool:
        """Whether rows without any advantage have a part in the gradient, or in that of other rows; else nobody
        computes them."""
        whole_step = isinstance(self.gate, StepGate) and not isinstance(
            self.gate, M2po
        )  # which looks at moves away alone
        return bool(self.kl.coefficient or self.entropy_bonus or whole_step or self._looks_at_the_step)

    @property
    def _looks_at_the_step(self) -> bool:
        """Whether something beside the gate depends on all tokens of the optimiser step."""
        rule = self.correction_rule
        return self.top_entropy < 1 or rule.normalise or rule.denominator == "kept"

    def check(self, group_size: int, annotations: Set[str]) -> None:
        """Refuse a credit rule that could not work in a stage with groups of this size which writes these annotations.

        Raises:
            BadInput: it compares more members than there are, or reads what nobody writes; or every group would be
                filtered.
        """
        refuse_group_size(self.credit, group_size)
        refuse_annotations(self.credit, annotations)
        self._check_rewards()
        if group_size < 2 and self.zero_variance_filter:
            got, do = (
                "a filter that drops every group of one",
                "write zero_variance_filter = false, or raise rollout.group_size",
            )
            raise refusal("algo.zero_variance_filter", "groups that can differ", got, do)

    def _check_rewards(self) -> None:
        """What changes rewards changes something that the credit reads, and nothing that it cannot."""
        if self.kl_reward is not None and isinstance(self.credit, BLIND_TO_TOKENS):
            got, do = (
                repr(name_of(self.credit)),
                "set algo.kl.coefficient, which is in the loss, or choose another credit",
            )
            raise refusal("algo.kl_reward", "a credit that counts rewards of tokens", got, do)
        if isinstance(self.credit, MaxRl) and (self.shaping or self.kl_reward is not None):
            got, do = "shaping or kl_reward, which may make them negative", "leave these out, or choose another credit"
            raise refusal("algo.credit", "rewards of at least 0 for 'maxrl'", got, do)
        if any(isinstance(rule, StopProperly) for rule in self.shaping[1:]):
            got, do = "it behind another, which may make them negative", "write it first"
            raise refusal("algo.shaping stop_properly", "rewards of at least 0", got, do)
        if isinstance(self.credit, Gdpo):
            named_parts = [str(rule.__struct_config__.tag) for rule in self.shaping]
            unread = [name for name in named_parts if name not in self.credit.weights]
            if unread:
                do = f"give {unread[0]} a weight in algo.credit.weights, or leave it out"
                raise refusal("algo.shaping", "parts that 'gdpo' weighs, for it reads no sum", unread[0], do)


def named(algo: Any) -> Any:
    """`[algo]` as it is written, with presets filled in and every part as a table with its name. What is not understood
    is left for the config to refuse."""
    if not isinstance(algo, Mapping):
        return algo
    given = {key: _table(key, value) for key, value in algo.items()}
    preset = str(given.get("preset", ""))
    if preset:
        _known("preset", preset, ALGORITHMS)
    filled = {key: _table(key, value) for key, value in ALGORITHMS.get(preset, {}).items()}
    for key, value in given.items():
        base = filled.get(key)
        _refuse_foreign_keys(key, value, base, preset)
        # a name stands for itself; a table changes what is there
        tables = isinstance(algo[key], Mapping) and isinstance(base, Mapping)
        filled[key] = {**base, **value} if tables and value.get("name", base.get("name")) == base.get("name") else value
    correction = filled.get("correction")
    if (
        isinstance(correction, Mapping)
        and correction.get("weight", "none") != "none"
        and not correction.get("metrics_only")
    ):
        filled.setdefault("anchor", "proximal")
    _refuse_whole_reward(filled.get("kl_reward"))
    return {key: _with_name(key, value) for key, value in filled.items()}


def _table(key: str, value: Any) -> Any:
    if key in RULES and isinstance(value, str):
        return {"name": value}
    if key == "correction" and isinstance(value, str) and value != "auto":
        return CORRECTIONS[_known(key, value, CORRECTIONS, "auto")]
    return value


def _with_name(key: str, value: Any) -> Any:
    if key not in RULES or not isinstance(value, Mapping):
        return value
    name = value.get("name", RULES[key].__struct_config__.tag)
    return {**value, "name": _known(key, name, [rule.__struct_config__.tag for rule in RULES_BY_KEY[key]])}


def _refuse_foreign_keys(key: str, value: Any, base: Any, preset: str) -> None:
    """Refuse settings of a part that names no rule, where the rule that the preset or the default chose has no such
    settings."""
    if key not in RULES or not isinstance(value, Mapping) or "name" in value:
        return
    chosen = base["name"] if isinstance(base, Mapping) else RULES[key].__struct_config__.tag
    rule = next(rule for rule in RULES_BY_KEY[key] if rule.__struct_config__.tag == chosen)
    known = [field.name for field in msgspec.structs.fields(rule)]
    foreign = [name for name in value if name not in known]
    if foreign:
        rule_of = (
            f"the {key} {chosen!r} of preset {preset!r}"
            if isinstance(base, Mapping)
            else f"the default {key} {chosen!r}"
        )
        what = f"a key of {rule_of}: {', '.join(sorted(known))}" if known else f"no key: {rule_of} has none"
        raise InvalidValue(("algo", key, foreign[0]), what, repr(foreign[0]))


def _refuse_whole_reward(price: Any) -> None:
    if isinstance(price, Mapping) and price.get("estimator") == "full":
        why = "which is the same whatever is sampled in a place, so that no token would pay for itself"
        do = 'set algo.kl.estimator = "full", which is in the loss'
        raise InvalidValue(("algo", "kl_reward", "estimator"), "one of k1, k2, k3, abs", f"'full', {why}", do)


def _known(key: str, name: Any, *names: Any) -> Any:
    """The name, if it is one of these.

    Raises:
        InvalidValue: it is not.
    """
    known = [one for of in names for one in ([of] if isinstance(of, str) else of)]
    if name not in known:
        raise InvalidValue(("algo", key), f"one of {', '.join(sorted(known))}", repr(name))
    return name
