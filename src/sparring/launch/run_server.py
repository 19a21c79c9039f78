"""Server of a run for programs outside its process: workers, and senders of rewards. Its keys are in the run's
folder."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from sparring.errors import BadInput, boundary, refusal
from sparring.gateway.server import gateway_here
from sparring.gateway.workers import RunKeys
from sparring.observe.atomic_write import write_whole
from sparring.rollout.config import RolloutConfig

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
async def outside(
    config: RolloutConfig,
    folder: Path,
    tell: Callable[[str, str], None],
    gateway: str = "",
    keys_of: Path | None = None,
) -> AsyncIterator[None]:
    """Serve workers and senders of rewards inside a context, and write address and keys into the folder. Keys of an
    earlier process of the run are used again.

    Args:
        gateway: address of `sparring gateway` that answers instead of the run's server, or empty.
        keys_of: folder with the keys to use; None uses `folder`.

    Raises:
        BadInput: the folder cannot be made.
    """
    path = folder / KEYS
    with boundary(BadInput, str(folder), "a folder that can be created", "choose another --name"):
        folder.mkdir(parents=True, exist_ok=True)
    earlier = (_read_keys(keys_of / KEYS) if keys_of is not None else None) or _read_keys(path)
    keys = earlier or new_keys()
    async with gateway_here().open_outside(
        keys, config.gateway.listen, config.gateway.lease_s, gateway.rstrip("/")
    ) as url:
        write_keys(path, url, keys)
        tell("run", f"programs elsewhere: {url}, keys in {path}")
        yield


def _read_keys(path: Path) -> RunKeys | None:
    """Return the keys of an earlier process, or None if there is no file of keys. Raises BadInput if the file is
    invalid."""
    if not path.exists():
        return None
    try:
        file = msgspec.json.decode(path.read_bytes(), type=KeysFile)
    except (OSError, msgspec.DecodeError) as error:
        raise refusal(str(path), "address and keys of the run", str(error), "remove it: new keys are made") from error
    return RunKeys(worker=file.worker_key, reward=file.reward_key)


def new_keys() -> RunKeys:
    """Return random keys."""
    return RunKeys(worker=f"wk-{secrets.token_urlsafe(24)}", reward=f"rk-{secrets.token_urlsafe(24)}")


def write_keys(path: Path, url: str, keys: RunKeys) -> None:
    """Write the file of keys, readable only by its owner."""
    file = KeysFile(url=url, worker_key=keys.worker, reward_key=keys.reward)
    write_whole(path, msgspec.json.encode(file), mode=0o600)
