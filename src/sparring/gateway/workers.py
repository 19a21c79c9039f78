"""Endpoints of external workers, which claim rollouts, renew their leases and finish them.

    POST /v1/rollouts/claim           waits for a rollout; status 204 after the waiting time
    POST /v1/rollouts/{id}/renew      restarts the time of the lease
    POST /v1/rollouts/{id}/finish     ends the rollout

The API key is the run's worker key. A claim returns the keys of its rollout, which expire with the lease.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sparring.errors import BadInput, SparringError, refusal
from sparring.gateway.body_reader import read_body, read_form
from sparring.gateway.connection import while_connected
from sparring.gateway.dialects.dialect import NO_RETRY
from sparring.gateway.dialects.fields import body_of
from sparring.gateway.keys import WrongKey, key_of
from sparring.gateway.refusals import Answer, json_response
from sparring.gateway.rewards import MOST_BYTES
from sparring.record.leases import Lease, LeaseConflict, LeaseEnd, LeaseExpired, Leases, RunOver, UnknownLease
from sparring.record.rewards import RewardConflict, RewardExpired, RewardsClosed, UnknownReply

LONGEST_WAIT_S = 600.0
MODEL = "policy"


class NoWorkers(BadInput):
    """Error of a claim in a run whose rollouts are not played by workers."""


STATUSES: tuple[tuple[type[SparringError], int, str], ...] = (
    (NoWorkers, 403, "no_workers"),
    (UnknownLease, 404, "unknown_lease"),
    (LeaseConflict, 409, "conflict"),
    (LeaseExpired, 410, "expired"),
    (RunOver, 410, "over"),
    (WrongKey, 401, "wrong_key"),
    (UnknownReply, 404, "unknown_reply"),
    (RewardConflict, 409, "conflict"),
    (RewardExpired, 410, "expired"),
    (RewardsClosed, 403, "no_rewards"),
    (BadInput, 400, "invalid_request"),
)
"""Errors with their status and name, by which workers and reward programs distinguish them; the first match counts."""


class RunKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of a run for external programs."""

    worker: str
    """Key of workers."""

    reward: str
    """Key that gives rewards to any rollout that waits for rewards."""


class ClaimForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Claim of a worker."""

    environments: tuple[str, ...] = ()
    """Environments that the worker can play; empty: all."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S)] = 0.0
    """Maximum waiting time in seconds."""

    worker: str = ""
    """Name of the worker, for reports."""

    id: str = ""
    """Id of the claim. A claim that is repeated because its response was lost gets the lease of the first claim. Empty:
    every claim is a new one."""


class WorkerRoutes:
    """Endpoints of workers.

    Attributes:
        leases: leases of the run; None if workers do not play the run's rollouts.
    """

    def __init__(self) -> None:
        self.leases: Leases | None = None
        self._key = self._url = ""

    def open(self, key: str, lease_s: float, url: str = "") -> None:
        """Start to answer workers.

        Args:
            lease_s: seconds until a lease expires unless it is renewed.
            url: URL at which workers reach the model; empty: the URL of their claim.
        """
        self._key, self._url, self.leases = key, url, Leases(lease_s)

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Answer claims while the context lasts. Afterwards, waiting and later claims fail with `RunOver`, or with
        `RunStopped` after an error."""
        stopped = True
        try:
            yield
            stopped = False
        finally:
            if self.leases is not None:
                self.leases.close(stopped=stopped)

    def pause(self) -> None:
        """Keep all leases alive while workers cannot renew them, because no gateway is connected."""
        if self.leases is not None:
            self.leases.pause()

    def go_on(self) -> None:
        """Let leases expire again, each after its full time."""
        if self.leases is not None:
            self.leases.go_on()

    def answers(self) -> dict[str, Answer]:
        """Return the functions that answer POST requests, by path."""
        answers = {"claim": self._claim, "{id}/renew": self._renew, "{id}/finish": self._finish}
        return {f"/v1/rollouts/{path}": answer for path, answer in answers.items()}

    async def _claim(self, request: Request) -> Response:
        leases = self._leases(request)
        form = read_form(body_of(await read_body(request, MOST_BYTES)), ClaimForm, "a claim")
        claim = asyncio.ensure_future(leases.claim(form.environments, form.wait_s, form.worker, form.id))
        lease = await while_connected(request.receive, claim)
        if lease is None:
            return Response(status_code=204)
        url = self._url or str(request.base_url).rstrip("/")
        return json_response(_claim_body(lease, leases.lease_s, url))

    async def _renew(self, request: Request) -> Response:
        leases = self._leases(request)
        leases.renew(request.path_params["id"])
        return json_response({"lease_s": leases.lease_s})

    async def _finish(self, request: Request) -> Response:
        leases = self._leases(request)
        end = read_form(body_of(await read_body(request, MOST_BYTES)), LeaseEnd, "the end of a rollout")
        leases.finish(request.path_params["id"], end)
        return json_response({"outcome": end.outcome})

    def _knows(self, key: str) -> bool:
        return bool(self._key) and secrets.compare_digest(key.encode(), self._key.encode())

    def _leases(self, request: Request) -> Leases:
        """Return the leases, if the request has the worker key.

        Raises:
            WrongKey: the request has a wrong key or no key.
            NoWorkers: workers do not play the rollouts of this run.
        """
        key = key_of(request)
        if self.leases is None:
            do = 'set rollout.harness = "workers" in the recipe'
            raise NoWorkers(str(refusal("claim", "a run that workers play", "one that plays its rollouts itself", do)))
        if not self._knows(key):
            do = "send that of keys.json in the run's folder"
            raise WrongKey(str(refusal("API key", "the run's worker key", "another", do)))
        return self.leases


def reachable_host(host: str) -> str:
    """Return the host under which this machine reaches a socket that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _claim_body(lease: Lease, lease_s: float, url: str) -> dict[str, Any]:
    entry = dict(lease.offer.shown)
    if entry.pop("hosts_tools", False):
        entry["mcp"] = f"{url}/mcp"
    return {"id": lease.id, "lease_s": lease_s, "url": url, "model": MODEL, **entry}


def refuse_program(request: Request, error: SparringError) -> Response:
    """Return the response to an error of a worker, or of a program that gives rewards."""
    status, kind, headers = 503, "not_stored", {"retry-after": "1"}
    for type_of_error, code, name in STATUSES:
        if isinstance(error, type_of_error):
            status, kind, headers = code, name, NO_RETRY
            break
    body = {"error": {"type": kind, "message": str(error)}}
    return json_response(body, status, headers)
