"""`cluster.kind = "inline"`: trainer and engine in this process, each on its own thread, without servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sparring.cluster.trainer import TrainerParts, load_model
from sparring.cluster.turns import Turns
from sparring.engine.config import EngineConfig
from sparring.errors import BadInput, refusal
from sparring.log import Report, log_event
from sparring.model.config import ModelConfig, ServedConfig
from sparring.protocols import Engine, Trainer, TrainPlan, ValueModel
from sparring.train.config import TrainConfig
from sparring.types import POLICY

if TYPE_CHECKING:
    from sparring.cluster.ranks import RankTrainer
    from sparring.engine.adapters.remote import RemoteEngine
    from sparring.engine.fleet import Fleet
    from sparring.engine.members import Keeper
    from sparring.train.trainer import LocalTrainer
    from sparring.weights.links import WeightLinks


class InlineCluster:
    """Cluster that creates trainers and engines of a run in this process. Implements `protocols.Cluster`.

    Args:
        engine: config of `[engine]`, for the policy. Other models use its settings if they are a native engine's.
        device: resolved device, `cpu` or `cuda`.
        threads: number of CPU threads of the trainer and of the engine each, at least 1.
        tell: called, in any thread, when a trainer or engine starts, is lost or comes back: with the stage, a sentence
            for the log, and facts as data.

    Attributes:
        engine_of: config of the engine of each model.
        report: `tell` for the present stage: called with a sentence and facts.
    """

    def __init__(
        self,
        *,
        models: dict[str, ModelConfig],
        train: TrainConfig,
        engine: EngineConfig,
        device: str,
        threads: int,
        colocate: bool = False,
        tell: Callable[[str, str, Mapping[str, Any]], None] = lambda stage, text, facts: log_event(text, facts),
    ) -> None:
        self._stage = "cluster"
        self.report: Report = lambda text, facts: tell(self._stage, text, facts)
        self.models, self._train, self.device, self.threads = models, train, device, threads
        others = engine if engine.kind == "native" else EngineConfig()
        self.engine_of = defaultdict(lambda: others, policy=engine)
        self._engines: list[Engine] = []
        self._trainers: list[LocalTrainer | RankTrainer] = []
        self._rewards: dict[tuple[str, str], ValueModel] = {}
        self._links: WeightLinks | None = None
        self._turns = Turns() if colocate else None

    def check(self) -> list[str]:
        if self._turns is None:
            return []
        if self.device != "cpu":
            raise refusal("run.device", '"cpu" with cluster.colocate', self.device, "set it, or colocate = false")
        return ["cluster: the policy's engine sleeps while its trainer computes, and gives its memory back"]

    def trainer(self, name: str, *, path: str, plan: TrainPlan) -> Trainer:
        return self.add_trainer(self.parts(name, path, plan).trainer())

    def parts(self, name: str, path: str, plan: TrainPlan) -> TrainerParts:
        """Return the data from which `TrainerParts.trainer` makes the trainer of a model."""
        return TrainerParts(
            name=name,
            path=path,
            plan=plan,
            models=self.models,
            train=self._train,
            device=self.device,
            threads=self.threads,
        )

    def add_trainer(self, trainer: LocalTrainer | RankTrainer) -> Trainer:
        """Keep a trainer, wherever it computes, to close it after the stage. Return the trainer for the stage."""
        self._trainers.append(trainer)
        return trainer if self._turns is None else self._turns.training(trainer)

    def engine(self, name: str, *, path: str) -> Engine:
        if (served := self.models[name].served) is not None:
            self._engines.append(self._served_engine(name, served))
            return self._engines[-1]
        kinds = {"native": self._native, "vllm": self._vllm, "remote": self._remote, "openai": self._openai}
        return self.add_engine(name, kinds[self.engine_of[name].kind](name, path))

    def add_engine(self, name: str, engine: Engine) -> Engine:
        """Keep the engine of a model, wherever it runs, to close it after the stage. Return the engine for the
        stage."""
        self._engines.append(engine)
        return self._turns.serving(engine) if self._turns is not None and name == POLICY else engine

    def value_model(self, name: str, *, path: str) -> ValueModel:
        from sparring.engine.reward import RewardModel

        if (name, path) not in self._rewards:
            model = load_model(self.models[name], path, self.device, head="scalar")
            budget = self._train.tokens_at_once
            self._rewards[name, path] = RewardModel(model, token_budget=budget, threads=self.threads)
        return self._rewards[name, path]

    def _served_engine(self, name: str, served: ServedConfig) -> Engine:
        from sparring.engine.adapters.client import read_api_key
        from sparring.engine.adapters.remote import RemoteEngine

        if served.kind == "remote":
            return RemoteEngine(served.url, name=name, api_key=read_api_key(served.api_key_env))
        return _openai_engine(served.url, served.served_model, served.api_key_env)

    def _native(self, name: str, path: str) -> Engine:
        from sparring.engine.native import NativeEngine

        return NativeEngine(
            load_model(self.models[name], path, self.device), self.engine_of[name], name=name, threads=self.threads
        )

    def _vllm(self, name: str, path: str) -> Engine:
        from sparring.engine.adapters.vllm import VllmEngine
        from sparring.engine.adapters.vllm_server import VllmServer

        if self.engine_of[name].elsewhere:
            return self._remote(name, path)
        spec = self.models[name]
        server = VllmServer(path, self.engine_of[name], dtype=spec.dtype, threads=self.threads)
        return VllmEngine(server, self.engine_of[name], name=name, dtype=spec.dtype)

    def _remote(self, name: str, path: str) -> Engine:
        from sparring.engine.adapters.client import read_api_key

        config = self.engine_of[name]
        return self.fleet(name, path, config.urls, read_api_key(config.api_key_env))

    def fleet(
        self, name: str, path: str, urls: Sequence[str], key: str, keeper: Keeper[RemoteEngine] | None = None
    ) -> Fleet[RemoteEngine]:
        """Connect to the servers of a model and send them its weights. A run has checked before its first stage that
        all servers answer; a server that does not answer now joins the fleet later. `keeper` restarts the servers; None
        if the user started them. Raises BadInput if no server answers, or a server does not fit the model or
        `[engine]`."""
        from sparring.engine.adapters.remote import RemoteEngine
        from sparring.engine.adapters.remote_client import check_distinct
        from sparring.engine.fleet import Fleet
        from sparring.weights.fetch import links

        config = self.engine_of[name]
        self._links = self._links or links(config.shared_folder)
        make = partial(
            RemoteEngine,
            name=name,
            api_key=key,
            links=self._links,
            timeout_s=config.update.timeout_s,
            join=lambda engine: self._send_first(name, path, [engine]),
        )
        there, absent, refusals = list[RemoteEngine](), list[RemoteEngine](), list[BadInput]()
        for url in urls:
            try:
                there.append(make(url))
            except BadInput as error:
                absent.append(make(url, awaited=True))
                refusals.append(error)
        if not there:
            raise refusals[0]
        for refused in refusals:
            self.report(f"{refused}; it joins when it answers", {"kind": "engine absent"})
        check_distinct(there)
        self._send_first(name, path, there)
        room, silent_s, report = config.batch.max_running, config.silent_s, self.report
        return Fleet(there, absent=absent, room=room, silent_s=silent_s, keeper=keeper, report=report)

    def _send_first(self, name: str, path: str, engines: Sequence[RemoteEngine]) -> None:
        """Check the servers of a model, and send them the model's weights as version 0. A server without a model gets
        the model's files first. Blocks."""
        from sparring.model.hub import base_folder

        spec = self.models[name]
        model = load_model(spec, path, self.device)
        own = model.adapters.everywhere
        for engine in engines:
            engine.send_files(base_folder(path), spec.dtype, spec.numerics)
            engine.check(spec.dtype, model.path_name, self.engine_of[name])
        for engine in engines:
            engine.begin(model.state(), None if own is None else own.state())

    def _openai(self, name: str, path: str) -> Engine:
        config = self.engine_of[name]
        return _openai_engine(config.urls[0], config.served_model, config.api_key_env)

    @asynccontextmanager
    async def stage(self, name: str) -> AsyncIterator[None]:
        self._stage = name
        try:
            yield
        finally:
            await self._close_parts()

    async def close(self) -> None:
        """Close every trainer and engine and their threads. Safe to call twice."""
        await self._close_parts()

    async def _close_parts(self) -> None:
        if self._turns is not None:
            self._turns.end()
        while self._engines:
            await self._engines.pop().close()
        while self._trainers:
            await self._trainers.pop().close()
        while self._rewards:
            await self._rewards.popitem()[1].close()
        if self._links is not None:
            self._links.close()


def _openai_engine(url: str, model: str, key_variable: str) -> Engine:
    from sparring.engine.adapters.client import read_api_key
    from sparring.engine.adapters.openai_compatible import OpenAiEngine

    return OpenAiEngine(url, model=model, api_key=read_api_key(key_variable))
