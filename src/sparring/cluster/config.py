"""`[cluster]`: processes of a run."""

from __future__ import annotations

from typing import Literal

import msgspec

MOST_ENGINES = 1024
MOST_RANKS = 64
LEAST_TIMEOUT_S = 3.0
MOST_S = 1e6
"""Longest time limit; poll(2) counts milliseconds in 32 bits."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[cluster]`: processes of the run. None of these settings changes a sampled token or a weight."""

    kind: Literal["inline", "local", "ray"] = "inline"
    """inline: trainer and engine in the run's process; local: engines of the policy in separate processes on this
    machine; ray: such processes on the nodes of a Ray cluster. Engine processes start with the first stage that
    samples, serve the later stages too, and are restarted when they die."""

    engines: int = 1
    """Number of engine processes; the requests are distributed among them (docs/engine/fleet.md)."""

    engine_threads: int = 0
    """Number of CPU threads of each engine process; 0: those of `run.threads` divided among the engines."""

    ranks: int = 1
    """Number of processes (ranks) that train each model together, with kind "local" or "ray". Each rank holds a shard
    of the optimiser: gradients, master weights and moments (docs/cluster.md)."""

    rank_threads: int = 0
    """Number of CPU threads of each of several ranks; 0: those of `run.threads` divided among the ranks."""

    colocate: bool = False
    """Whether trainer and engine of the policy take turns on the same memory, for synchronous runs (`rollout.max_lag =
    0`) with kind "inline" or "local": the engine gives the memory of weights and cache back while the trainer computes
    (docs/cluster.md)."""

    shard: Literal["optimiser", "parameters"] = "optimiser"
    """What is divided among the ranks. optimiser: gradients, master weights and moments; parameters: also the model's
    parameters, which are gathered for one layer at a time. "parameters" is for models of the Llama family that are
    trained as a whole, without a moving average, and needs several ranks."""

    timeout_s: float = 30.0
    """Seconds without a sign of life after which a trainer's rank counts as hanging. All ranks are then replaced, as
    when a rank dies, and train the steps since the last checkpoint again."""

    start_timeout_s: float = 300.0
    """Time limit for an engine process, or for the trainer's ranks, to load the model and to answer, in seconds."""

    address: str = "auto"
    """Address of the Ray cluster, `host:port`; auto: the cluster that this machine belongs to."""

    wait_s: float = 60.0
    """Seconds to wait until the Ray cluster has enough processors for engines and ranks."""

    def __post_init__(self) -> None:
        if not 1 <= self.engines <= MOST_ENGINES:
            raise ValueError(f"engines must be 1 to {MOST_ENGINES}, got {self.engines}")
        if self.kind == "inline" and self.engines > 1:
            raise ValueError(f'engines must be 1 with kind "inline", got {self.engines}; set kind = "local"')
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"ranks must be 1 to {MOST_RANKS}, got {self.ranks}")
        if self.kind == "inline" and self.ranks > 1:
            raise ValueError(f'ranks must be 1 with kind "inline", got {self.ranks}; set kind = "local"')
        if self.shard == "parameters" and self.ranks == 1:
            raise ValueError('shard must be "optimiser" with one rank, got "parameters"; set ranks = 2 or more')
        if self.kind == "ray" and self.colocate:
            raise ValueError('colocate must be false with kind "ray", whose engines have memory of their own, got true')
        if min(self.engine_threads, self.rank_threads) < 0 or not self.start_timeout_s > 0 or not self.wait_s >= 0:
            raise ValueError("engine_threads, rank_threads and wait_s must be 0 or more and start_timeout_s above 0")
        if not self.timeout_s >= LEAST_TIMEOUT_S:
            raise ValueError(f"timeout_s must be at least {LEAST_TIMEOUT_S:g}, got {self.timeout_s:g}")
        for name in ("timeout_s", "start_timeout_s", "wait_s"):
            if getattr(self, name) > MOST_S:
                raise ValueError(f"{name} must be at most {MOST_S:g}, got {getattr(self, name):g}")
