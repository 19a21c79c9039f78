"""Check of a turn's pieces that a server has sent, before they are recorded. Torch-free.

A broken server, or one that another run has begun to use, must cause an error and not a wrong token in a record.
"""

from __future__ import annotations

from collections.abc import Sized

from sparring.errors import EngineError
from sparring.generation import Completion, Delta, GenerateRequest, Runs


class TurnCheck:
    """Check of one turn, piece by piece; `where` names the request in error messages."""

    def __init__(self, request: GenerateRequest, vocab_size: int, where: str) -> None:
        self._request, self._vocab_size, self._where = request, vocab_size, where
        self._told: list[int] = []

    def check(self, piece: Delta | Completion, newest: int | None) -> None:
        """Check the next piece. Its tokens must be of versions up to `newest`, or of any version if `newest` is None.
        Raises EngineError if its version is newer, its fields do not fit together, or a completion does not have the
        earlier pieces' tokens."""
        if isinstance(piece, Completion):
            if self._told and tuple(self._told) != piece.tokens:
                self._refuse(f"a turn of the {len(self._told)} tokens told before", f"other {len(piece.tokens)}")
            told, scored = len(piece.tokens), len(piece.prompt_logprobs or ())
            if self._request.prompt_logprobs and scored != len(self._request.tokens) - 1:
                self._refuse(f"{len(self._request.tokens) - 1} log-probabilities of the prompt", str(scored))
        else:
            self._told += piece.tokens
            told = len(self._told)
        if told > self._request.sampling.max_tokens:
            self._refuse(f"at most {self._request.sampling.max_tokens} tokens", str(told))
        self._check_parts(piece)
        if newest is not None and max(piece.versions.values, default=newest) > newest:
            version = f"{max(piece.versions.values)}; use one server per run"
            self._refuse(f"tokens of version {newest}, the last one sent, or older", version)

    def _check_parts(self, piece: Delta | Completion) -> None:
        """Check the ids of a piece, and that it has all log-probabilities, versions and other values per token."""
        tokens = piece.tokens
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            self._refuse(f"token ids below {self._vocab_size}", f"{min(tokens)} to {max(tokens)}")
        rows: dict[str, Sized | None] = {
            "logprobs": piece.logprobs,
            "kept": piece.kept,
            "top_logprobs": piece.top_logprobs,
        }
        for name, runs in (("versions", piece.versions), ("kv_versions", piece.kv_versions)):
            if runs != Runs() or isinstance(piece, Completion):  # an engine may tell them only at the end
                fits = len(runs.lengths) == len(runs.values) and min(runs.lengths, default=1) > 0
                rows[name] = runs if fits else ()
        for name, row in rows.items():
            if row is not None and len(row) != len(tokens):
                self._refuse(f"{len(tokens)} {name}", str(len(row)))

    def _refuse(self, expected: str, got: str) -> None:
        raise EngineError(f"{self._where}: expected {expected}, got {got}")
