"""Client for sending rewards to a run. It needs only the standard library, so a program without Sparring can use a
copy.

    send(url, reward_key, 0.5, of=response.id)  # for one reply
    send(url, reward_key, 1.0)                  # for the rollout; no other reward follows
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit


class RewardRefused(Exception):
    """The run refused a reward or another request.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def expired(self) -> bool:
        """True if the reward arrived after the rollout was scored."""
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
    """Send a reward for a rollout, or for one of its turns or branches. It is durable when this returns.

    The latest reward for a target counts. The call blocks: a coroutine in the run's own process has to call it in a
    thread (`asyncio.to_thread`).

    Args:
        url: base URL of the model's API, with or without `/v1` at the end.
        key: reward key of the rollout.
        reward: finite number; None means that the rollout is not scored, which differs from 0.
        of: id of the rewarded reply, as the vendor's client shows it; None for the rollout.
        branch: reward the branch that ends with the reply, instead of its turn.
        parts: named components, for reports.
        final: True if no other reward follows. None is True for the rollout's reward and False for others.
        timeout_s: longest wait for the answer, in seconds.

    Raises:
        RewardRefused: the run refused the reward.
        OSError: the gateway does not answer.
    """
    body = {"reward": reward, "of": of, "branch": branch, "parts": dict(parts or {}), "final": final}
    status, answer = post(url, "/v1/rewards", key, body, timeout_s=timeout_s)
    if status != 200:
        raise RewardRefused(status, answer)


def post(url: str, path: str, key: str, body: Mapping[str, Any], *, timeout_s: float = 30.0) -> tuple[int, str]:
    """Post JSON to a run, and return the status and the answer or its error message. Numbers of array libraries are
    sent as floats.

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
    """Return the message in an error's JSON, or the whole answer if it has another form."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer
