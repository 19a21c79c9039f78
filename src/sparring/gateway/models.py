"""Models of a session's endpoint: the session that answers to each model name, and lists of the names for each vendor's
clients."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.protocols import Session
from sparring.types import POLICY, Label

AUXILIARY = "auxiliary"
"""Name under which the policy answers titles and routing requests; these replies are recorded and not trained."""


class UnknownModel(BadInput):
    """Error of a model name that no entry of the table matches."""


class ModelTable:
    """Table of the models that a client may name.

    Args:
        policy: session of the trained model, whose name is `policy`.
        models: sessions of other models by name, such as auxiliary or external ones. A string instead of a session
            makes the name an alias of another entry, which may be `auxiliary`. A name may contain `*` for any
            characters; exact names have precedence, then patterns in their order.

    Raises:
        BadInput: an alias names an unknown entry or another alias, or an entry is named `policy`.
    """

    def __init__(self, policy: Session, models: Mapping[str, Session | str] = {}) -> None:
        if POLICY in models:
            do = "name the other model otherwise"
            raise refusal(f"models.{POLICY}", "the rollout's own session", "another", do)
        own = {name: model for name, model in models.items() if not isinstance(model, str)}
        sessions = {POLICY: policy, AUXILIARY: policy, **own}
        for alias, name in models.items():
            if isinstance(name, str) and name not in sessions:
                raise refusal(f"models.{alias}", f"one of {', '.join(sessions)}", repr(name), "correct the table")
        self._sessions = sessions
        self._hidden = {POLICY, AUXILIARY} - own.keys()
        self._targets = {alias: name for alias, name in models.items() if isinstance(name, str)}
        self._patterns = tuple(name for name in models if "*" in name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names without `*`, the policy's first."""
        names = (POLICY, *(name for name in self._sessions if name not in self._hidden), *self._targets)
        return tuple(name for name in names if "*" not in name)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Distinct sessions, the policy's first."""
        return tuple(dict.fromkeys(self._sessions.values()))

    def session(self, name: str) -> Session:
        """Return the session of the model with this name.

        Raises:
            UnknownModel: no entry matches the name.
        """
        return self._sessions[self._entry(name)]

    def label(self, name: str) -> Label | None:
        """Return the label of replies under a model name; always None if `auxiliary` is a model of its own.

        Raises:
            UnknownModel: no entry matches the name, and `auxiliary` is no model of its own.
        """
        is_auxiliary = AUXILIARY in self._hidden and self._entry(name) == AUXILIARY
        return "auxiliary" if is_auxiliary else None

    def _entry(self, name: str) -> str:
        """Return the name of the entry whose session answers to a model name."""
        if name in self._sessions or name in self._targets:
            return self._targets.get(name, name)
        pattern = next((pattern for pattern in self._patterns if fnmatchcase(name, pattern)), None)
        if pattern is None:
            expected = f"one of {', '.join((*self.names, *self._patterns))}"
            do = "name one of these, or add the name to rollout.models"
            raise UnknownModel(str(refusal("model", expected, repr(name), do)), "model")
        return self._targets.get(pattern, pattern)

    def list_for_openai(self) -> dict[str, Any]:
        """Return the models in the format of OpenAI and Anthropic, which are compatible."""
        rows = [openai_entry(name) for name in self.names]
        return {"object": "list", "data": rows, "has_more": False, "first_id": rows[0]["id"], "last_id": rows[-1]["id"]}

    def list_for_google(self) -> dict[str, Any]:
        """Return the models in Google's format."""
        return {"models": [google_entry(name) for name in self.names]}


def openai_entry(name: str) -> dict[str, Any]:
    """Return one model in the format of OpenAI and Anthropic."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "sparring"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def google_entry(name: str) -> dict[str, Any]:
    """Return one model in Google's format."""
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}
