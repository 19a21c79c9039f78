"""Grammars that constrain a turn, by the `llguidance` library: the tokens that may follow the tokens so far.

The engine sees ids only; the renderer, which has the tokenizer, passes a `Grammar` as `GenerateRequest.allowed`. The
completion returns the allowed ids as the kept set of each token, so training renormalises over this set as over any
other (law 2).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from sparring.errors import BadInput, boundary, refusal
from sparring.generation import Constraint, Preface
from sparring.protocols import Renderer
from sparring.render.calls.schemas import schema_of
from sparring.render.control import MARK
from sparring.render.grammars.call_format import CallFormat, call_format
from sparring.render.grammars.call_grammar import call_grammar, check_calls
from sparring.render.grammars.preface import WORD, find_preface
from sparring.render.grammars.value_grammar import as_read
from sparring.render.tokenizer import FileTokenizer

REMEMBERED = 64


class Grammar:
    """Grammar over one vocabulary, for one request, made by `Grammars`. The parser state of the last call is cached.
    Ids beyond the tokenizer's vocabulary are never allowed.

    Args:
        matcher: `llguidance.LLMatcher` at the beginning of the text.
        preface: ids before the text, if any; inside the thought among these ids, the mask is `thought`.
    """

    def __init__(self, matcher: Any, preface: Preface | None, thought: bytes) -> None:
        self._start, self._preface, self._thought = matcher, preface, thought
        self._matcher = matcher.deep_copy()
        self._taken: list[int] = []

    def __call__(self, tokens: Sequence[int]) -> bytes:
        """Return one bit per token of the vocabulary, lowest first: set if the token may follow `tokens`, the turn so
        far.

        Raises:
            ValueError: the grammar does not allow `tokens`.
        """
        turn, preface = tuple(tokens), self._preface
        before = preface.before(turn) if preface else ()
        if before is None:
            return self._thought
        way = before if len(before) > len(turn) or not preface else preface.begin
        following = 1 << way[len(turn)] if len(way) > len(turn) and way[: len(turn)] == turn else 0
        if not following or not turn:  # a thought, or the text at once
            following |= int.from_bytes(self._after(turn[len(before) :]), "little")
        return following.to_bytes(len(self._thought), "little")

    def _after(self, tokens: Sequence[int]) -> bytes:
        taken = len(self._taken)
        if list(tokens[:taken]) != self._taken:
            self._matcher, taken = self._start.deep_copy(), 0
        self._taken = list(tokens)
        if not self._matcher.consume_tokens(self._taken[taken:]):
            problem = self._matcher.get_error().splitlines()[0]
            # a matcher cannot recover from an error
            self._matcher, self._taken = self._start.deep_copy(), []
            raise ValueError(f"grammar: expected tokens that it allows, got {list(tokens[taken:])}: {problem}")
        return bytes(self._matcher.compute_bitmask())


class Grammars:
    """Factory of grammars for one tokenizer.

    Args:
        stop_ids: ids that end a turn, allowed wherever a grammar is complete.
        renderer: renderer that writes the calls of tools; without one, a constraint to calls is refused.

    Raises:
        BadInput: there are no stop tokens, or the library cannot read the tokenizer.
    """

    def __init__(self, tokenizer: FileTokenizer, stop_ids: Sequence[int], renderer: Renderer | None = None) -> None:
        if not stop_ids:
            raise refusal(
                "constraint",
                "stop tokens, which end a turn whose grammar is complete",
                "none",
                "give the request stop tokens",
            )
        import llguidance  # only where a turn is constrained

        self._library = llguidance
        self._renderer = renderer
        self._tokenizer, self._stop_ids = tokenizer, list(stop_ids)
        size = self._renamed_vocabulary.vocab_size
        self._thought = ((1 << size) - 1 & ~sum(1 << id for id in {*stop_ids})).to_bytes(-(-size // 32) * 4, "little")
        self._prefaces: dict[bool, Preface | None] = {}
        # the requests of a run have few constraints, and a schema takes milliseconds
        self._compiled = lru_cache(REMEMBERED)(self._compile)
        self._written = lru_cache(REMEMBERED)(self._write)

    def of(self, constraint: Constraint, preface: Preface | None = None) -> Grammar:
        """Return the grammar of one request. A constraint of kind `tool_call` holds the grammar that `calls` wrote.

        Raises:
            BadInput: the constraint does not compile.
        """
        return Grammar(self._compiled(constraint), preface, self._thought)

    def preface(self, prompt: Sequence[int]) -> Preface | None:
        """Return the ids before the text of a reply to a prompt, as `find_preface` does; None without a renderer."""
        if self._renderer is None:
            return None
        thinks = self._renderer.parse(self._tokenizer.encode(WORD), (), prompt=prompt).reasoning is not None
        if thinks not in self._prefaces:
            self._prefaces[thinks] = find_preface(self._renderer, self._tokenizer, prompt)
        return self._prefaces[thinks]

    def calls(self, source: str, prompt: Sequence[int]) -> str:
        """Return the grammar of a reply of calls, in Lark's notation, over the ids of the tokenizer.

        Args:
            prompt: ids that the reply continues; the prompt may end inside a thought.

        Raises:
            BadInput: there is no renderer, or the format cannot be constrained to these calls.
        """
        return str(self._written(source, self._calls.begins(self._writer, prompt)))

    @cached_property
    def _renamed_vocabulary(self) -> Any:
        """The vocabulary with renamed control tokens, so that a grammar allows control tokens by id and never as text.
        With their own names, the library would find them when it encodes the literal texts of a grammar."""
        data = json.loads(self._tokenizer.as_json())
        names = {text: f"{MARK}{id}" for text, id in self._tokenizer.control.ids.items()}
        for token in data.get("added_tokens") or ():
            token["special"] = token["special"] or token["content"] in names
            token["content"] = names.get(token["content"], token["content"])
        model = data["model"]
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
        if pairs:
            model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(text, text): id for text, id in vocabulary.items()}
        elif vocabulary:
            model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        return self._table(json.dumps(data))

    @cached_property
    def _calls(self) -> CallFormat:
        return call_format(self._writer, self._tokenizer)

    @property
    def _writer(self) -> Renderer:
        if self._renderer is None:
            expected = "the grammar of the calls, where there is no renderer to write it"
            raise refusal("tool call", expected, "none", "bind the request (Renderer.bind), or leave the choice free")
        return self._renderer

    def _write(self, source: str, begun: bool) -> str:
        with boundary(BadInput, "tool call", "one that compiles", "correct it"):
            grammar = call_grammar(self._calls.begun() if begun else self._calls, source)
            check_calls(self._writer, self._tokenizer, self._calls, source)
        return grammar

    def _table(self, tokenizer: str) -> Any:
        with boundary(BadInput, "constraint", "a tokenizer that llguidance reads", "use another model"):
            return self._library.LLTokenizer(tokenizer, eos_token=self._stop_ids)

    def _compile(self, constraint: Constraint) -> Any:
        make, source = self._library.LLMatcher, constraint.source
        where = constraint.kind.replace("_", " ")
        with boundary(BadInput, where, "one that compiles", "correct it"):
            if constraint.kind == "json_schema":
                schema = schema_of(json.loads(source))
                grammar = make.grammar_from_json_schema(json.dumps(as_read(schema.top, schema)))
            else:
                grammar = (make.grammar_from_regex if constraint.kind == "regex" else make.grammar_from_lark)(source)
        matcher = make(self._renamed_vocabulary, grammar, log_level=0)
        if matcher.is_error() and constraint.kind == "lark":  # it may name control tokens
            matcher = make(self._table(self._tokenizer.as_json()), grammar, log_level=0)
        if matcher.is_error():
            raise refusal(where, "one that compiles", matcher.get_error().splitlines()[0], "correct it")
        return matcher
