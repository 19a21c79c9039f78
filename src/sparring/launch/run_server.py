"""Server of a run for programs outside its process: workers, senders of rewards, and `sparring gateway`. Its keys are
in the run's folder."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sparring.errors import BadInput, boundary, refusal
from sparring.observe.atomic_write import write_whole
from sparring.recipe.run_config import RunConfig

if TYPE_CHECKING:
    from sparring.gateway.workers import RunKeys

KEYS = "keys.json"
"""File of the run's folder with the address and the keys, readable only by its owner."""


class KeysFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file of keys."""

    url: str
    """Address of the server as seen from this machine, or address of `sparring gateway`."""

    worker_key: str
    """Key of workers."""

    reward_key: str
    """Key for rewards of any rollout."""


@asynccontextmanager
async def answered_outside(
    config: RunConfig,
    folder: Path,
    tell: Callable[[str, str], None],
    *,
    gateway_too: bool = True,
    keys_of: Path | None = None,
) -> AsyncIterator[None]:
    """Serve programs outside the process inside a context, if the recipe has any: workers and senders of rewards, whose
    address and keys are written into the folder, and `sparring gateway`, which then answers in place of this process.
    Keys of an earlier process of the run are used again.

    Args:
        keys_of: folder whose keys are used, if it has a file of keys.

    Raises:
        BadInput: the folder cannot be made, or its file of keys is invalid.
    """
    settings = config.rollout.gateway
    gateway = settings.url if gateway_too else ""
    async with AsyncExitStack() as stack:
        if "workers" in config.harnesses or config.rollout.rewards.within_s is not None:
            from sparring.gateway.server import gateway_here

            with boundary(BadInput, str(folder), "a folder that can be created", "choose another --name"):
                folder.mkdir(parents=True, exist_ok=True)
            keys = (keys_of and _read_keys(keys_of / KEYS)) or _read_keys(folder / KEYS) or new_keys()
            served = gateway_here().open_outside(keys, settings.listen, settings.lease_s, gateway.rstrip("/"))
            url = await stack.enter_async_context(served)
            write_keys(folder / KEYS, url, keys)
            tell("run", f"programs elsewhere: {url}, keys in {folder / KEYS}")
        if gateway:
            from sparring.gateway.handover import behind_gateway

            await stack.enter_async_context(behind_gateway(folder, gateway, partial(tell, "gateway")))
        yield


def _read_keys(path: Path) -> RunKeys | None:
    """Return the keys of an earlier process, or None if there is no file of keys. Raises BadInput if the file is
    invalid."""
    from sparring.gateway.workers import RunKeys

    if not path.exists():
        return None
    try:
        file = msgspec.json.decode(path.read_bytes(), type=KeysFile)
    except (OSError, msgspec.DecodeError) as error:
        raise refusal(str(path), "address and keys of the run", str(error), "remove it: new keys are made") from error
    return RunKeys(worker=file.worker_key, reward=file.reward_key)


def new_keys() -> RunKeys:
    """Return random keys."""
    from sparring.gateway.workers import RunKeys

    return RunKeys(worker=f"wk-{secrets.token_urlsafe(24)}", reward=f"rk-{secrets.token_urlsafe(24)}")


def write_keys(path: Path, url: str, keys: RunKeys) -> None:
    """Write the file of keys, readable only by its owner."""
    file = KeysFile(url=url, worker_key=keys.worker, reward_key=keys.reward)
    write_whole(path, msgspec.json.encode(file), mode=0o600)
