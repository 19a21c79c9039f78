"""Client for rewards from outside. It needs the standard library alone: a program without Sparring may have a copy.

send(url, reward_key, 1.0)                         # of the rollout, and the last one
send(url, reward_key, 0.5, of=response.id)         # of one reply
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit


class RewardRefused(Exception):
    """A reward, or another word to a run, that does not count.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def expired(self) -> bool:
        """True where it came after the rollout was scored."""
        return self.status == 410


def send(
    url: str,
    key: str,
    reward: float | None,
    of: str | None = None,
    *,
    branch: bool = False,
    parts: Mapping[str, float] | None = None,
    final: bool | None = None,
    timeout_s: float = 30.0,
) -> None:
    """Give a rollout, or a turn or a branch of it, a reward. It is durable when this returns. It blocks: a coroutine
    of the run's own process calls it in a thread (`asyncio.to_thread`). Sent again, the latest of a target counts.

    Args:
        url: base URL that the program has for the model; with `/v1` at the end or without.
        key: the reward key of the rollout.
        reward: a finite number; None says that the rollout is not scored, which is not 0.
        of: id of a reply, as the vendor's client shows it; None: of the rollout.
        branch: whether it is of the branch that the reply stands in, earned at its end.
        parts: named components, for reports.
        final: whether no other reward follows; None: after the rollout's none does, after others some do.
        timeout_s: longest wait for the answer, in seconds.

    Raises:
        RewardRefused: it does not count.
        OSError: the gateway does not answer.
    """
    body = {"reward": reward, "of": of, "branch": branch, "parts": dict(parts or {}), "final": final}
    status, answer = post(url, "/v1/rewards", key, body, timeout_s=timeout_s)
    if status != 200:
        raise RewardRefused(status, answer)


def post(url: str, path: str, key: str, body: Mapping[str, Any], *, timeout_s: float = 30.0) -> tuple[int, str]:
    """Post JSON to a run; return the status, and the answer or its error's message. A number of an array library is
    sent as a float.

    Raises:
        OSError: the run does not answer.
    """
    place = urlsplit(url)
    connected = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    connection = connected(place.netloc, timeout=timeout_s)
    try:
        path = place.path.rstrip("/").removesuffix("/v1") + path
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body, default=float).encode(), headers)
        response = connection.getresponse()
        answer = response.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"{url}: the run does not answer ({type(error).__name__}: {error})") from error
    finally:
        connection.close()
    return response.status, answer if response.status < 300 else _message_of(answer)


def _message_of(answer: str) -> str:
    """Return the message of an error, or the whole answer where it is of another form."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer
