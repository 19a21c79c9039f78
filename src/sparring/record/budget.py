"""Budget of a session: turns and tokens that its concurrent requests may sample together."""

from __future__ import annotations

import asyncio
from collections import deque

from sparring.errors import LimitReached
from sparring.types import Limits, Usage


class Budget:
    """Budget of turns and sampled tokens.

    A request is granted its maximum number of tokens before sampling, and returns the unused tokens. If the grants of
    other requests leave too few tokens, the request waits, in order of arrival: a rollout ends at its limit because of
    tokens that were sampled, never because of tokens that were only granted."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._name, self._limits = name, limits
        self._usage = Usage()
        self._under_way = self._tokens = 0
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    def check(self, usage: Usage) -> None:
        """Store the current usage. Raises LimitReached if no turns or tokens remain, or after too many tool calls."""
        self._usage = usage
        if usage.turns >= self._limits.max_turns:
            raise self._out_of_turns()
        if usage.tool_calls > self._limits.max_tool_calls:
            raise self.too_many_calls()
        if usage.sampled_tokens >= self._limits.max_tokens:
            raise self._out_of_tokens()

    async def grant(self, most: int) -> int:
        """Wait for tokens and return their number: `most`, or fewer if no other request holds a grant and fewer remain.
        Raises LimitReached if no tokens or turns remain."""
        if not self._waiting and (granted := self._available(most)) is not None:
            return self._take(granted)
        granting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((most, granting))
        try:
            return await granting
        except asyncio.CancelledError:
            if granting.done() and not granting.cancelled() and granting.exception() is None:
                self.give_back(granting.result(), self._usage)
            else:
                granting.cancel()
                self._wake_waiting()
            raise

    def give_back(self, granted: int, usage: Usage) -> None:
        """Return the grant of a finished request. `usage`: usage of the session now."""
        self._usage = usage
        self._under_way -= 1
        self._tokens -= granted
        self._wake_waiting()

    def too_many_calls(self) -> LimitReached:
        """Return the error of a rollout that exceeds its limit of tool calls."""
        return LimitReached("max_tool_calls", f"{self._name}: more than {self._limits.max_tool_calls} tool calls")

    def _take(self, granted: int) -> int:
        self._under_way += 1
        self._tokens += granted
        return granted

    def _available(self, most: int) -> int | None:
        """Return the number of tokens for a request now, or None if it has to wait. Raises LimitReached if no tokens or
        turns remain, and no grant will be returned."""
        usage, limits = self._usage, self._limits
        turns = limits.max_turns - usage.turns
        rest = limits.max_tokens - usage.sampled_tokens
        if turns < 1:
            raise self._out_of_turns()
        if rest < 1:
            raise self._out_of_tokens()
        if self._under_way < turns and most <= rest - self._tokens:
            return most
        return None if self._under_way else min(most, rest)

    def _wake_waiting(self) -> None:
        while self._waiting:
            most, granting = self._waiting[0]
            if granting.done():
                self._waiting.popleft()
                continue
            try:
                granted = self._available(most)
            except LimitReached as limit:
                granting.set_exception(limit)
                continue
            if granted is None:
                return
            granting.set_result(self._take(granted))

    def _out_of_turns(self) -> LimitReached:
        return LimitReached("max_turns", f"{self._name}: {self._limits.max_turns} turns are used up")

    def _out_of_tokens(self) -> LimitReached:
        return LimitReached("max_tokens", f"{self._name}: {self._limits.max_tokens} sampled tokens are used up")
