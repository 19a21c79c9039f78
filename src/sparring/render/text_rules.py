"""Binding of a request's stop strings and constraint, which are text, to rules over token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from sparring.generation import GenerateRequest
from sparring.protocols import Renderer
from sparring.render.grammars.grammar import Grammars
from sparring.render.stop_strings import StopStrings
from sparring.render.tokenizer import FileTokenizer


class TextRules:
    """Translator of the text rules of requests, for one tokenizer.

    Args:
        renderer: renderer that writes the calls of tools; without one, a constraint to calls is refused.
    """

    def __init__(self, tokenizer: FileTokenizer, stop_ids: Sequence[int], renderer: Renderer | None = None) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = tuple(stop_ids)
        self._renderer = renderer

    def bind(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with `ends` made from its stop strings, and `allowed` made from its constraint. If
        missing, `grammar` is added for a constraint to tool calls, and `preface` for any other constraint."""
        strings, constraint = request.sampling.stop_strings, request.sampling.constraint
        if strings:
            request = replace(request, ends=StopStrings(self._tokenizer, strings))
        if constraint and constraint.kind == "tool_call":
            grammar = request.grammar or self._grammars.calls(constraint.source, request.tokens)
            request, constraint = replace(request, grammar=grammar), replace(constraint, source=grammar)
        elif constraint and request.preface is None:
            preface = self._grammars.preface(request.tokens[: len(request.tokens) - request.told])
            request = replace(request, preface=preface)
        if constraint:
            request = replace(request, allowed=self._grammars.of(constraint, request.preface))
        return request

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._tokenizer, self._stop_ids, self._renderer)


class TokenizedFormat:
    """Base of the renderers. Implements `Renderer` except for the methods that depend on the format.

    Attributes:
        stop_ids: ids that end a turn; the first is the one that the format writes.
    """

    tokenizer: FileTokenizer
    stop_ids: tuple[int, ...]
    _text_rules: TextRules

    @property
    def control_ids(self) -> Mapping[str, int]:
        return self.tokenizer.control.ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)

    @property
    def longest_token(self) -> int:
        return self.tokenizer.longest

    def bytes_of(self, token: int) -> bytes:
        return self.tokenizer.bytes_of(token)

    def bind(self, request: GenerateRequest) -> GenerateRequest:
        return self._text_rules.bind(request)
