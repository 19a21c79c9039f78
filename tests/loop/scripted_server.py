"""An engine in a process of its own: a script behind the server of `sparring serve`, which says how far it may go.

    scripted_server.py PORT

It prints its port. A line "STOP AT" on its input shuts a gate behind so many tokens of each reply (it prints "waits"
where one stands there), and "GO ON" opens it for good.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn

from sparring.engine.metrics import Latencies
from sparring.engine.server import Serving, TokenServer
from sparring.engine.wire import ServedModel
from sparring.generation import Completion, Delta, GenerateRequest
from sparring.render.demonstrate import reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer
from sparring.types import Message

RENDERER = toy_renderer()


def said(request: GenerateRequest) -> tuple[int, ...]:
    """A reply that differs with the prompt and with the seed, and with nothing else."""
    text = f"{len(request.tokens)} tokens and {request.sampling.seed % 997} gave this reply of a few words"
    return tuple(reply_tokens(RENDERER, Message(role="assistant", content=text)))


class GatedEngine(ScriptedEngine):
    """A scripted engine with a gate, for `TokenServer`."""

    problem = None

    def __init__(self) -> None:
        super().__init__(said)
        self.latencies = Latencies()
        self.shut_at, self.opened = 0, asyncio.Event()

    async def drop(self, adapter: str) -> None:
        """Do nothing: there are none."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the end of the stream."""
        *_, completion = [piece async for piece in self.stream(request)]
        assert isinstance(completion, Completion)
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Yield each token, up to the gate."""
        number = 0
        async for piece in super().stream(request):
            if number == self.shut_at and not self.opened.is_set():
                print("waits", flush=True)
                await self.opened.wait()
            yield piece
            number += 1

    async def obey(self, lines: asyncio.StreamReader) -> None:
        """Shut and open the gate as the input says."""
        async for line in lines:
            word = line.decode().strip()
            if word == "GO ON":
                self.opened.set()
            else:
                self.shut_at = int(word)
                self.opened.clear()


async def main() -> None:
    """Serve until the process is killed or its input ends."""
    engine = GatedEngine()
    engine.opened.set()
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    served = ServedModel(
        model="policy",
        version=0,
        dtype="float32",
        numerics="script",
        vocab_size=RENDERER.tokenizer.vocab_size,
        max_positions=1 << 20,
        context=1 << 20,
        token_bytes=1,
        instance="script",
    )
    application = TokenServer(Serving(engine, served, lambda request: request)).application()
    config = uvicorn.Config(application, log_level="warning", access_log=False, lifespan="off")
    serving = asyncio.create_task(uvicorn.Server(config).serve(sockets=[listening]))
    print(listening.getsockname()[1], flush=True)
    await engine.obey(lines)
    serving.cancel()


if __name__ == "__main__":
    asyncio.run(main())
