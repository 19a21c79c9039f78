"""Server of a checkpoint for other processes. It opens the socket, then the model, and then answers requests until it
is stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn

from sparring.engine.config import EngineConfig, check_settings
from sparring.engine.server import Bind, ServedEngine, Serving, TokenServer
from sparring.engine.wire import ServedModel
from sparring.errors import BadInput, refusal
from sparring.gateway.client_protocol import MOST_HEAD, ClientProtocol
from sparring.gateway.hosts import at_home, plainly
from sparring.gateway.serving import BoundedServer, listen_on, server_settings, url_of
from sparring.kernels.devices import Device, resolve_device
from sparring.model.config import DType, Numerics
from sparring.model.hub import base_folder
from sparring.model.peft import is_adapter
from sparring.recipe.load import from_data
from sparring.render.text_rules import TextRules
from sparring.render.tokenizer import FileTokenizer, load_tokenizer
from sparring.scratch import scratch
from sparring.weights.upload import BUCKET

if TYPE_CHECKING:
    from sparring.engine.native import NativeEngine
    from sparring.model.causal import CausalModel

_log = logging.getLogger("sparring.engine")
BACKLOG = 2048
REMEMBERED = 8
"""Number of sets of stop tokens for which the compiled stop strings and constraints are cached."""

GRACE_S = 10.0
"""Seconds that running responses may take after the server was stopped."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server: its model, the model's name, its address, and its engine. `unix` is the path of a socket,
    used instead of host and port. Port 0 takes a free one. `numerics` None is "exact", with vLLM its own. Without a
    folder, the first run sends the model, its dtype and its numerics."""

    folder: Path | None = None
    name: str = "policy"
    host: str = "127.0.0.1"
    port: int = 8000
    unix: Path | None = None
    api_key: str = ""
    dtype: DType = "float32"
    numerics: Numerics | None = None
    device: Device = "auto"
    engine: EngineConfig = EngineConfig()
    threads: int = 0


def engine_config(settings: Sequence[str]) -> EngineConfig:
    """Return an `[engine]` section with changes in the form of `--set`.

    Raises:
        BadInput: the engine has no such key, or the value does not fit it.
    """
    for setting in settings:
        if not setting.startswith("engine."):
            raise refusal(
                f"--set {setting}", "a key of [engine]", "another", "write it like engine.batch.max_running=32"
            )
    recipe = {"run": {"name": "serve"}, "models": {"policy": {"path": "."}}, "env": {"name": "none"}}
    engine = from_data(recipe, "the engine's settings", settings).engine
    if engine.kind not in ("native", "vllm") or engine.urls:
        other = f"{engine.kind!r}{' with urls' * bool(engine.urls)}"
        raise refusal("engine.kind", '"native" or "vllm", which this command serves', other, "leave it out")
    check_settings(engine)
    return engine


def serve(config: ServeConfig, ready: Callable[[str], None]) -> None:
    """Serve until the process is interrupted, and call `ready` with the address when requests are answered. Requests
    that still run then end with an `EngineError`.

    Raises:
        SystemExit: the process was terminated by a signal.
    """
    signal.signal(signal.SIGTERM, _end)
    serve_engine(config, lambda: _open_engine(config), ready)


def serve_engine(config: ServeConfig, opened: Callable[[], ServedEngine | None], ready: Callable[[str], None]) -> None:
    """Listen, open an engine, call `ready` with the address, and serve until the process is interrupted, which closes
    the engine. If `opened` returns None, clients send the model."""
    with ExitStack() as stack:
        listening, url = _listen(config, stack)
        engine = opened()
        stack.callback(_sweep)
        server = server_of(engine, config, lambda: ready(url))
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets=[listening]))


def stop_with_input() -> None:
    """Terminate this process when its standard input ends: by SIGTERM, and by force if it runs on too long."""

    def wait() -> None:
        while os.read(0, 1 << 16):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S + 5)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _open_engine(config: ServeConfig) -> ServedEngine | None:
    from sparring.model.load import load

    if config.engine.kind == "vllm":
        return _open_vllm(config)
    device = resolve_device(config.device, "--device")
    if config.folder is None:
        return None
    model = load(config.folder, dtype=config.dtype, numerics=config.numerics or "exact", device=device)
    return _engine_of(model, config)


def _open_vllm(config: ServeConfig) -> ServedEngine:
    """Start vLLM. This process is terminated when vLLM ends."""
    from sparring.engine.adapters.vllm import VllmEngine
    from sparring.engine.adapters.vllm_server import VllmServer

    if config.folder is None:
        raise refusal("MODEL", "a model's folder for vLLM", "none", "name it: sparring serve MODEL")
    if config.device != "auto":
        raise refusal("--device", "none with vLLM, which takes its own", config.device, "leave it out")
    if config.numerics is not None:
        raise refusal("--numerics", "none with vLLM, which has its own", config.numerics, "leave it out")
    if is_adapter(config.folder):
        advice = "serve a whole model: sparring export ADAPTER FOLDER"
        raise refusal(f"model {config.folder}", "a model without adapter for vLLM", "an adapter", advice)
    server = VllmServer(config.folder, config.engine, dtype=config.dtype, threads=_threads(config))

    def wait() -> None:
        if ending := server.wait():
            _log.error("this server ends with its engine%s", ending)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
    return VllmEngine(server, config.engine, name=config.name, dtype=config.dtype)


def _threads(config: ServeConfig) -> int:
    return config.threads or len(os.sched_getaffinity(0))


def _engine_of(model: CausalModel, config: ServeConfig) -> NativeEngine:
    from sparring.engine.native import NativeEngine

    return NativeEngine(model, config.engine, name=config.name, threads=_threads(config))


def _open_files(config: ServeConfig, found: Mapping[str, bytes], dtype: str, numerics: str) -> Serving:
    """Open an engine on files that a client sent, which are on disk only during this call. Raises BadInput if the files
    have no model that can be served."""
    from sparring.model.load import without_weights
    from sparring.weights import files

    with scratch() as folder:
        files.write(found, folder)
        tokenizer = load_tokenizer(folder) if "tokenizer.json" in found else None
        device = resolve_device(config.device, "--device")
        try:
            model = without_weights(folder, dtype=dtype, numerics=numerics, device=device)
        except BadInput as error:
            raise BadInput(str(error).replace(str(folder), "the sent files")) from error
    engine = _engine_of(model, config)
    served = engine.describe(secrets.token_hex(8))
    most = max(served.state_bytes, sum(files.MOST_BYTES.values()))
    served = msgspec.structs.replace(served, files=files.digest(found), state_bytes=most)
    return Serving(engine, served, text_rules(lambda: tokenizer or _no_tokenizer()))


def _no_tokenizer() -> FileTokenizer:
    raise refusal("server", "a tokenizer.json among the files of its model", "none", "send it")


def _nothing(config: ServeConfig) -> Serving:
    """Describe a server that has no model yet."""
    from sparring.weights.files import MOST_BYTES

    sizes: dict[str, Any] = dict.fromkeys(("version", "vocab_size", "max_positions", "context", "token_bytes"), 0)
    served = ServedModel(
        model=config.name,
        dtype="",
        numerics="",
        instance=secrets.token_hex(8),
        state_bytes=sum(MOST_BYTES.values()),
        files="",
        **sizes,
    )
    return Serving(None, served, text_rules(_no_tokenizer))


def server_of(engine: ServedEngine | None, config: ServeConfig, ready: Callable[[], None]) -> StoppingServer:
    """Make the HTTP server of an engine, which closes the engine when it is stopped. Without an engine, clients send
    the model."""
    if engine is None:
        serving, opens = _nothing(config), partial(_open_files, config)
    else:
        folder, opens = config.folder or Path(), None
        rules = text_rules(lambda: load_tokenizer(base_folder(folder)))
        serving = Serving(engine, engine.describe(secrets.token_hex(8)), rules)
    tokens = TokenServer(serving, config.api_key, opens)
    keyed = bool(config.api_key)
    application = at_home(tokens.application(), plainly, keyed=lambda scope: keyed, names=(config.host,))
    options = server_settings(application, log_level="warning", timeout_graceful_shutdown=int(GRACE_S))
    return StoppingServer(options, tokens, ready)


class StoppingServer(BoundedServer):
    """HTTP server that closes its engine when it stops: running requests end with an error, then the connections
    close."""

    def __init__(self, config: uvicorn.Config, tokens: TokenServer, ready: Callable[[], None]) -> None:
        super().__init__(config, protocol=partial(ClientProtocol, most_sent=BUCKET + MOST_HEAD))
        self._tokens, self._ready = tokens, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start uvicorn's server, then report that it is ready."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, close the engine, then shut uvicorn's server down."""
        await self.stop_accepting()
        await self._tokens.close()
        await super().shutdown(sockets)


def _sweep() -> None:
    """Remove shared-memory files of publishers whose process has ended. The import is inside the function because it
    loads torch."""
    from sparring.weights.shared_memory import sweep

    sweep()


def _end(number: int, frame: FrameType | None) -> None:
    """Handle a signal by raising SystemExit, so that the socket is removed. uvicorn raises the signal again after its
    shutdown."""
    sys.exit(128 + number)


def text_rules(load: Callable[[], FileTokenizer]) -> Bind:
    """Return a function that binds the stop strings and the constraint of a request to a tokenizer, which is loaded at
    the first request. The request's stop tokens end its turn."""
    tokenizer = cache(load)
    by_stop_ids = lru_cache(REMEMBERED)(lambda stop_ids: TextRules(tokenizer(), stop_ids))
    return lambda request: by_stop_ids(request.sampling.stop).bind(request)


def _listen(config: ServeConfig, stack: ExitStack) -> tuple[socket.socket, str]:
    """Return a listening socket and its address before the slow work begins. `stack` closes the socket."""
    if config.unix is not None:
        return _listen_unix(config.unix, stack), f"unix:{config.unix}"
    listening = stack.enter_context(listen_on(config.host, config.port, "choose another --host or --port"))
    return listening, url_of(config.host, listening)


def _listen_unix(path: Path, stack: ExitStack) -> socket.socket:
    """Return a Unix socket that only its owner can access. It replaces a socket of a server that has ended."""
    # connecting to anything else fails in the same way as connecting to a socket without a server
    if path.exists() and not path.is_socket():
        raise refusal(str(path), "a free path, or a socket", "another kind of file", "choose another --unix")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            pass
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise refusal(str(path), "a path for a socket", str(error), "choose another --unix") from error
        else:
            raise refusal(str(path), "a free path", "a running server there", "choose another --unix")
    listening = socket.socket(socket.AF_UNIX)
    stack.callback(listening.close)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
        listening.listen(BACKLOG)
    except OSError as error:
        raise refusal(str(path), "a path for a socket", str(error), "choose another --unix") from error
    finally:
        os.umask(before)
    stack.callback(lambda: path.unlink(missing_ok=True))
    return listening
