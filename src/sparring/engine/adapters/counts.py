"""What an engine elsewhere has answered, as its client counts it."""

from __future__ import annotations

from collections import defaultdict

from sparring.generation import Completion


class Counts:
    """`values` since the start: completions, generated_tokens, cached_tokens, updates."""

    def __init__(self) -> None:
        self.values: dict[str, float] = defaultdict(float)

    def completed(self, completion: Completion) -> Completion:
        """Count a completion and pass it on."""
        self.values["completions"] += 1
        self.values["generated_tokens"] += len(completion.tokens)
        self.values["cached_tokens"] += completion.cached_tokens
        return completion

    def updated(self) -> None:
        """Count an update of the weights that was acknowledged."""
        self.values["updates"] += 1
