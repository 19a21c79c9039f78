"""`sparring.Engine`: opens a checkpoint in Python, to generate or to serve."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from sparring.engine.config import BatchConfig, EngineConfig
from sparring.errors import refusal
from sparring.generation import Completion, GenerateRequest, Sampling
from sparring.kernels.devices import Device, resolve_device
from sparring.launch.checkpoint import checkpoint_or_hub
from sparring.launch.interrupts import block
from sparring.model.config import DType, Numerics
from sparring.model.hub import base_folder
from sparring.render.load import load_renderer
from sparring.types import Message, ToolSpec

if TYPE_CHECKING:
    from sparring.engine.native import NativeEngine

Prompt = str | Sequence[Message]
SETTINGS = tuple(field.name for field in fields(Sampling) if field.name != "stop")
"""Fields of `Sampling` that `generate` accepts as keyword arguments. The checkpoint's format sets the stop tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One sampled reply.

    Attributes:
        completion: sampled ids, their log-probabilities, and why sampling ended.
    """

    message: Message
    prompt_tokens: tuple[int, ...]
    completion: Completion

    @property
    def text(self) -> str:
        """The reply's text."""
        return self.message.content


class CheckpointEngine:
    """The native engine on one checkpoint, for Python programs and notebooks. Close the engine, or use it in `with`.

        with Engine("runs/quickstart") as engine:
            [reply] = engine.generate("What is 12 * 13?", temperature=0, max_tokens=64)
            print(reply.text, reply.completion.logprobs)

    Args:
        checkpoint: Hugging Face folder or hub name, folder of an adapter or of a run, or a saved step of a run such as
            `runs/quickstart/rl/best`.
        dtype: data type of weights and computation.
        numerics: "exact" computes each sequence's bits independently of all others; "fast" is for models that cannot be
            exact.
        thinking: whether the model thinks before it answers, if its format has a switch for it.
        max_running: maximum number of requests that are computed together.
        threads: number of CPU threads; 0 uses every core.
        device: "cpu", "cuda", or "auto": a GPU if torch can use one.

    Raises:
        BadInput: the checkpoint does not exist, or cannot be served.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        dtype: DType = "float32",
        numerics: Numerics = "exact",
        thinking: bool = False,
        max_running: int = 128,
        threads: int = 0,
        device: Device = "auto",
    ) -> None:
        if not isinstance(checkpoint, (str, os.PathLike)):
            advice = "name a Hugging Face folder or the folder of a run"
            raise refusal("sparring.Engine", "the path of a checkpoint", type(checkpoint).__name__, advice)
        if not isinstance(max_running, int) or max_running < 1:
            raise refusal("sparring.Engine: max_running", "1 or more", repr(max_running), "correct it")
        from sparring.engine.native import NativeEngine
        from sparring.model.load import load

        name = os.fspath(checkpoint)
        self._folder = checkpoint_or_hub(name)
        self._dtype, self._numerics = dtype, numerics
        self._config = EngineConfig(batch=BatchConfig(max_running=max_running))
        self._renderer = load_renderer(base_folder(self._folder), thinking=thinking)
        model = load(str(self._folder), dtype=dtype, numerics=numerics, device=resolve_device(device, "device"))
        threads = threads or len(os.sched_getaffinity(0))
        self._engine: NativeEngine | None = NativeEngine(model, self._config, threads=threads)
        self._requests = 0

    def generate(
        self, *prompts: Prompt, samples: int = 1, tools: Sequence[ToolSpec] = (), **sampling: Any
    ) -> list[Generation]:
        """Sample replies to prompts, all at once.

        Args:
            prompts: prompts, each the text of a user message or a conversation of `Message`.
            samples: number of replies to each prompt, drawn independently.
            tools: tools that the model may call. Calls are returned in `Generation.message.tool_calls` and are not run.
            sampling: fields of `sparring.generation.Sampling`: temperature, top_p, top_k, min_p, max_tokens, seed,
                stop_strings, constraint, logit_bias, ... The same seed and prompts give the same replies.

        Returns:
            `samples` replies to the first prompt, then `samples` replies to the second, and so on.

        Raises:
            BadInput: a prompt or a setting is refused.
            EngineError: a prompt is longer than the context, or the engine was closed.
        """
        engine = self._open()
        unknown = sorted(sampling.keys() - set(SETTINGS))
        if unknown:
            raise refusal("sparring.Engine.generate", f"one of {', '.join(SETTINGS)}", unknown[0], "correct the name")
        if not prompts or samples < 1:
            given = f"{len(prompts)} prompts and samples={samples}"
            raise refusal("sparring.Engine.generate", "a prompt and samples of 1 or more", given, "give both")
        settings = Sampling(**{"stop": self._renderer.stop_ids, **sampling})
        requests = [
            self._request(prompt, tools, settings, (p, s)) for p, prompt in enumerate(prompts) for s in range(samples)
        ]
        completions = block(_gather(engine, requests))
        return [
            Generation(
                message=self._renderer.parse(completion.tokens, tools, prompt=request.tokens),
                prompt_tokens=request.tokens,
                completion=completion,
            )
            for request, completion in zip(requests, completions, strict=True)
        ]

    def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        api_key: str = "",
        ready: Callable[[str], None] = partial(print, "serving on", flush=True),
    ) -> None:
        """Serve the checkpoint over HTTP, with token ids as input and output, until Ctrl-C, which closes the engine.
        The same as `sparring serve`.

        Args:
            port: port to listen on; 0 takes a free one.
            api_key: key that clients must send; empty accepts every client.
            ready: called with the address when requests are answered.

        Raises:
            BadInput: the address is taken.
        """
        from sparring.launch.serve import ServeConfig, serve_engine

        engine = self._open()
        config = ServeConfig(
            folder=self._folder,
            host=host,
            port=port,
            api_key=api_key,
            dtype=self._dtype,
            numerics=self._numerics,
            engine=self._config,
        )
        serve_engine(config, lambda: engine, ready)
        self._engine = None

    def close(self) -> None:
        """Close the engine and free its memory. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            block(engine.close())

    def __enter__(self) -> CheckpointEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> NativeEngine:
        if self._engine is None:
            raise refusal("sparring.Engine", "an open engine", "a closed one", "open the checkpoint again")
        return self._engine

    def _request(
        self, prompt: Prompt, tools: Sequence[ToolSpec], settings: Sampling, number: tuple[int, int]
    ) -> GenerateRequest:
        """Return the request of one reply. Its seed depends on the prompt and the number of the sample."""
        messages = (Message(role="user", content=prompt),) if isinstance(prompt, str) else tuple(prompt)
        wrong = [message for message in messages if not isinstance(message, Message)]
        if wrong or not messages:
            given = f"one of {type(wrong[0]).__name__}" if wrong else "an empty one"
            advice = "give a text, or a list of sparring.Message"
            raise refusal("sparring.Engine.generate", "a text or a conversation", given, advice)
        self._requests += 1
        seed = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((settings.seed, *number)))
        request = GenerateRequest(
            id=f"generate/{self._requests}",
            tokens=tuple(self._renderer.render(messages, tools, generation=True).tokens),
            sampling=replace(settings, seed=seed),
        )
        return self._renderer.bind(request)


async def _gather(engine: NativeEngine, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """Return the completions in the order of the requests. If one fails, cancel the others."""
    running = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for request in running:
            request.cancel()
