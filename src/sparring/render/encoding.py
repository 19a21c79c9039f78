"""Encoding of plain text: by the `tokenizers` library at first, and by `fastokens` after `MUCH_TEXT` characters.

`fastokens` (Apache-2.0) takes a tenth of the time, but a second or two to load a vocabulary of 150,000 tokens. So
`fastokens` is loaded in a thread once that is likely to pay, and used only if every text of `proofs` gets the same ids.
Forked processes do not use it: a lock that one of its threads holds at the fork is never released.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from threading import Thread

from tokenizers import Tokenizer

try:
    import fastokens
except ImportError:  # no build of it for this machine
    fastokens = None

MUCH_TEXT = 100_000
"""Characters to encode before `fastokens` is loaded; twice the size of the vocabulary if that is more."""

LONG_TEXT = 200_000
"""Characters from which `fastokens` divides a text among threads."""

BATCHED_TEXT = 4000
"""Characters from which a text is encoded as a batch, since only a batch releases Python's lock."""

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches have one text; threads would warn at a fork

_process = {"is_forked": False}
os.register_at_fork(after_in_child=lambda: _process.update(is_forked=True))

_TOKENS_OF_A_PROOF = 40
_HARD = (
    "",
    " ",
    "\n",
    "  \n\n \t\r\n  x  ",
    "it's IT'S we'Ll don\u2019t 'S 's\u017f",
    "1234567 3.14159 1e-9 \u0661\u0662\u0663 \u2160\u2161 x\u00b2 \u00bd",
    "naive na\u00efve nai\u0308ve \u212b \ufb01 \u1e9b\u0323",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0939\u093f\u0928\u094d\u0926\u0940 \u0645\u0631\u062d\u0628\u0627",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u2764\ufe0f\x00\x1f\x7f\x85\xa0\u2028\u3000\ufeff\u200b",
    "def f(x):\n\t\treturn {\"a\": [1, -2.5e+10], 'b': x**2}  # why?\r\n\r\n\n<|im_start|>user</s><think>\n\n</think>",
    "a" * 300 + " " * 300 + "=" * 300 + "\n" * 300 + "\u00e9" * 300,
)


class TextEncoder:
    """Encoder of plain text as ids, without the tokens that a checkpoint puts around a text."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._fast: fastokens.Tokenizer | None = None
        self._left = max(MUCH_TEXT, 2 * backend.get_vocab_size())

    @property
    def quick(self) -> bool:
        """Return whether `fastokens` is in use."""
        return self._fast is not None and not _process["is_forked"]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that UTF-8 can carry."""
        if self._fast is not None and not _process["is_forked"]:
            try:
                ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
                return ids
            except ValueError:  # its regular expression gave up on this text
                return self._slow(text)
        before, self._left = self._left, self._left - len(text)
        if before > 0 >= self._left:
            Thread(target=self.quicken, name="quicken").start()
        return self._slow(text)

    def quicken(self) -> bool:
        """Load `fastokens` and compare it on `proofs`; return whether it is used from now on."""
        if fastokens is None or _process["is_forked"]:
            return False
        try:
            fast = fastokens.Tokenizer.from_json_str(self._backend.to_str())
            for text in proofs(self._backend):
                if fast.encode(text, add_special_tokens=False).ids != self._slow(text):
                    return False
        except ValueError:  # fastokens does not support this kind of tokenizer
            return False
        self._fast = fast
        return True

    def _slow(self, text: str) -> list[int]:
        if len(text) < BATCHED_TEXT:
            return self._backend.encode(text, add_special_tokens=False).ids
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def proofs(backend: Tokenizer) -> Iterator[str]:
    """Yield texts that tell two encoders apart: difficult texts, every token once among random neighbours, and a long
    text."""
    yield from _HARD
    ids = list(range(backend.get_vocab_size()))
    random.Random(0).shuffle(ids)
    long: list[str] = []
    length = 0
    for start in range(0, len(ids), _TOKENS_OF_A_PROOF):
        text = backend.decode(ids[start : start + _TOKENS_OF_A_PROOF], skip_special_tokens=False)
        yield text
        if length < LONG_TEXT:
            long.append(text)
            length += len(text)
    yield "".join(long) * (1 + LONG_TEXT // max(1, length))
