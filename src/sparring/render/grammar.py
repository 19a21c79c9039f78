"""Grammars that a turn keeps to, by the `llguidance` library (the extra `grammar`): which tokens may follow those so far.

The engine knows ids only; whoever has the tokenizer hands it a `Grammar` as `GenerateRequest.allowed`. What it allows comes
back as the kept set of each token, so training renormalises over it as over any other (law 2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import BadInput, boundary, refusal
from sparring.render.tokenizer import FileTokenizer


class Grammar:
    """One grammar over one vocabulary. Made by `Grammars`, one for each request: it remembers the turn it was last asked about.

    Args:
        matcher: `llguidance.LLMatcher` at the beginning of a turn.
    """

    def __init__(self, matcher: Any) -> None:
        self._start = matcher
        self._matcher = matcher.deep_copy()
        self._taken: list[int] = []

    def __call__(self, tokens: Sequence[int]) -> bytes:
        """A bit for each token of the vocabulary, lowest first: set where it may follow `tokens`, the turn so far.

        Raises:
            ValueError: the grammar does not allow `tokens`.
        """
        known = len(self._taken)
        if list(tokens[:known]) != self._taken:
            self._matcher, known = self._start.deep_copy(), 0
        self._taken = list(tokens)
        if not self._matcher.consume_tokens(self._taken[known:]):
            problem = self._matcher.get_error().splitlines()[0]
            # a matcher never leaves an error
            self._matcher, self._taken = self._start.deep_copy(), []
            raise ValueError(f"grammar: expected tokens that it allows, got {list(tokens[known:])}: {problem}")
        return bytes(self._matcher.compute_bitmask())


class Grammars:
    """Makes grammars for one tokenizer.

    Args:
        tokenizer: of the model that is asked.
        vocab_size: of the model, which may have more ids than the tokenizer.
        stop_ids: what ends a turn, allowed where a grammar is complete.

    Raises:
        BadInput: the extra is not installed, or the library cannot read the tokenizer.
    """

    def __init__(self, tokenizer: FileTokenizer, vocab_size: int, stop_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as cause:
            got = "no such package"
            raise refusal("grammar", "the package llguidance", got, 'pip install "sparring[grammar]"') from cause
        self._library = llguidance
        with boundary(BadInput, "grammar", "a tokenizer that llguidance reads", "use another model"):
            self._tokens = llguidance.LLTokenizer(tokenizer.as_json(), n_vocab=vocab_size, eos_token=list(stop_ids))

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON that a schema describes.

        Raises:
            BadInput: the schema does not compile.
        """
        with boundary(BadInput, "JSON schema", "a schema that compiles", "correct it"):
            source = self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return self._made("JSON schema", source)

    def regex(self, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole.

        Raises:
            BadInput: the expression does not compile.
        """
        return self._made("regular expression", self._library.LLMatcher.grammar_from_regex(pattern))

    def lark(self, source: str) -> Grammar:
        """Text of a context-free grammar in Lark's notation.

        Raises:
            BadInput: the grammar does not compile.
        """
        return self._made("grammar", self._library.LLMatcher.grammar_from_lark(source))

    def _made(self, kind: str, source: str) -> Grammar:
        matcher = self._library.LLMatcher(self._tokens, source, log_level=0)
        if matcher.is_error():
            raise refusal(kind, "one that compiles", matcher.get_error().splitlines()[0], "correct it")
        return Grammar(matcher)
