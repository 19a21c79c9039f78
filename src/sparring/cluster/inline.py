"""`cluster = "inline"`: trainer and engine in this process, each on a thread of its own, without servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from sparring.cluster.trainer import TrainerParts
from sparring.engine.config import EngineConfig
from sparring.model.config import ModelConfig, ServedConfig
from sparring.protocols import Engine, Trainer, TrainPlan, ValueModel
from sparring.train.config import TrainConfig

if TYPE_CHECKING:
    import torch

    from sparring.cluster.ranks import RankTrainer
    from sparring.engine.adapters.remote import RemoteEngine
    from sparring.engine.fleet import Fleet
    from sparring.model.causal import CausalModel
    from sparring.train.trainer import LocalTrainer
    from sparring.weights.links import WeightLinks


class InlineCluster:
    """Cluster that creates the parts of a run in this process. Implements `protocols.Cluster`.

    Args:
        models: configs of `[models]` by name.
        train: config of `[train]`.
        engine: config of `[engine]`, for the policy. Other models use its settings if they are a native engine's.
        device: resolved device, `cpu` or `cuda`.
        threads: number of CPU threads of the trainer and of the engine each, at least 1.
    """

    def __init__(
        self,
        *,
        models: dict[str, ModelConfig],
        train: TrainConfig,
        engine: EngineConfig,
        device: str,
        threads: int,
    ) -> None:
        self._models = models
        self._train = train
        others = engine if engine.kind == "native" else EngineConfig()
        self._engine_of = defaultdict(lambda: others, policy=engine)
        self._device = device
        self._threads = threads
        self._engines: list[Engine] = []
        self._trainers: list[LocalTrainer | RankTrainer] = []
        self._rewards: dict[tuple[str, str], ValueModel] = {}
        self._links: WeightLinks | None = None

    def check(self) -> list[str]:
        return []

    def trainer(self, name: str, *, path: str, plan: TrainPlan) -> Trainer:
        trainer = self._parts(name, path, plan).trainer()
        self._trainers.append(trainer)
        return trainer

    def _parts(self, name: str, path: str, plan: TrainPlan) -> TrainerParts:
        return TrainerParts(
            name=name,
            path=path,
            plan=plan,
            models=self._models,
            train=self._train,
            device=self._device,
            threads=self._threads,
        )

    def engine(self, name: str, *, path: str) -> Engine:
        served = self._models[name].served
        if served is not None:
            engine = self._served_engine(name, served)
            self._engines.append(engine)
            return engine
        kinds = {"native": self._native, "vllm": self._vllm, "remote": self._remote, "openai": self._openai}
        engine = kinds[self._engine_of[name].kind](name, path)
        self._engines.append(engine)
        return engine

    def value_model(self, name: str, *, path: str) -> ValueModel:
        from sparring.engine.reward import RewardModel
        from sparring.model.load import load

        if (name, path) not in self._rewards:
            spec = self._models[name]
            model = load(path, dtype=spec.dtype, device=self._device, numerics=spec.numerics, head="scalar")
            budget = self._train.tokens_at_once
            self._rewards[name, path] = RewardModel(model, token_budget=budget, threads=self._threads)
        return self._rewards[name, path]

    def _served_engine(self, name: str, served: ServedConfig) -> Engine:
        from sparring.engine.adapters.client import read_api_key
        from sparring.engine.adapters.openai_compatible import OpenAiEngine
        from sparring.engine.adapters.remote import RemoteEngine

        key = read_api_key(served.api_key_env)
        if served.kind == "remote":
            return RemoteEngine(served.url, name=name, api_key=key)
        return OpenAiEngine(served.url, model=served.served_model, api_key=key)

    def _native(self, name: str, path: str) -> Engine:
        from sparring.engine.native import NativeEngine

        return NativeEngine(self._model(name, path), self._engine_of[name], name=name, threads=self._threads)

    def _vllm(self, name: str, path: str) -> Engine:
        from sparring.engine.adapters.vllm import VllmEngine
        from sparring.engine.adapters.vllm_server import VllmServer

        spec = self._models[name]
        server = VllmServer(path, self._engine_of[name], dtype=spec.dtype, threads=self._threads)
        return VllmEngine(server, self._engine_of[name], name=name, dtype=spec.dtype)

    def _remote(self, name: str, path: str) -> Engine:
        from sparring.engine.adapters.client import read_api_key

        config = self._engine_of[name]
        fleet = self._fleet(name, path, config.urls, read_api_key(config.api_key_env))
        return fleet.engines[0] if len(config.urls) == 1 else fleet

    def _fleet(
        self,
        name: str,
        path: str,
        urls: Sequence[str],
        key: str,
        lost: Callable[[RemoteEngine], None] = lambda engine: None,
    ) -> Fleet[RemoteEngine]:
        """Connect to the servers of a model and send them its weights.

        Args:
            lost: called with the client of a server that does not answer any more.
        """
        from sparring.engine.adapters.remote import RemoteEngine
        from sparring.engine.adapters.remote_client import check_distinct, reachable
        from sparring.engine.fleet import Fleet
        from sparring.weights.fetch import links

        spec, config = self._models[name], self._engine_of[name]
        self._links = self._links or links(config.shared_folder)
        connect = partial(RemoteEngine, name=name, api_key=key, links=self._links, timeout_s=config.update.timeout_s)
        engines = reachable([partial(connect, url) for url in urls])
        model = self._model(name, path)
        for engine in engines:
            engine.check(spec.dtype, model.path_name, config)
        check_distinct(engines)
        for engine in engines:
            engine.begin(*_states(model))
            engine.initial = lambda: _states(self._model(name, path))
        room, silent_s = config.batch.max_running, config.silent_s
        return Fleet(engines, room=room, silent_s=silent_s, lost=lost)

    def _openai(self, name: str, path: str) -> Engine:
        from sparring.engine.adapters.client import read_api_key
        from sparring.engine.adapters.openai_compatible import OpenAiEngine

        config = self._engine_of[name]
        return OpenAiEngine(config.urls[0], model=config.served_model, api_key=read_api_key(config.api_key_env))

    def _model(self, name: str, path: str) -> CausalModel:
        from sparring.model.load import load

        spec = self._models[name]
        return load(path, dtype=spec.dtype, device=self._device, numerics=spec.numerics)

    async def close(self) -> None:
        """Close every part and its threads. Safe to call twice."""
        while self._engines:
            await self._engines.pop().close()
        while self._trainers:
            await self._trainers.pop().close()
        while self._rewards:
            await self._rewards.popitem()[1].close()
        if self._links is not None:
            self._links.close()


def _states(model: CausalModel) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None]:
    """Return the weights of a model and of its adapter, if it has one."""
    own = model.adapters.everywhere
    return model.state(), None if own is None else own.state()
