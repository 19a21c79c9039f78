"""Models of the recipe that play roles of the environment: a simulated user, a fixed opponent."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.envs.roles import roles_of
from sparring.errors import EnvError, refusal
from sparring.protocols import Cluster, Engine, Store
from sparring.recipe.run_config import RunConfig
from sparring.record.recorder import Recorder
from sparring.record.session import OpenSession
from sparring.rollout.episode import SessionRecorder
from sparring.stages.context import POLICY, SERVING_STAGES, Context, renderer_of
from sparring.stages.models.model_use import ModelUse, UsedModel
from sparring.stages.models.teacher import max_context_of, teacher_folder
from sparring.types import Task


def open_role_engines(config: RunConfig, cluster: Cluster) -> dict[str, Engine]:
    """Start an engine for every model but the policy in `[rollout] roles`; return them by the model's name."""
    names = sorted(set(models_by_role(config).values()))
    return {name: cluster.engine(name, path=str(teacher_folder(config, name))) for name in names}


def models_by_role(config: RunConfig) -> dict[str, str]:
    """Return the model of each role that the policy does not play."""
    rollout = config.rollout
    return {role: name for role, name in rollout.roles.items() if not rollout.speaks(role)}


def with_roles(
    config: RunConfig, recorder: SessionRecorder, engines: Mapping[str, Engine], store: Store | None = None
) -> SessionRecorder:
    """Return a recorder of all roles; each role in `[rollout] roles` has its own model, on the engine from
    `open_role_engines`."""
    by_role = models_by_role(config)
    if not by_role:
        return recorder
    recorders = {
        name: Recorder(
            engine,
            renderer_of(config, teacher_folder(config, name), name),
            store,
            sampling=config.rollout.sampling.build(),
            model=name,
            max_context=max_context_of(config, name),
        )
        for name, engine in engines.items()
    }
    return RoleRecorder(recorder, {role: recorders[name] for role, name in by_role.items()})


class PlayerUse(ModelUse):
    """Use of a model that speaks for roles of the environment that the policy does not play."""

    name = "player"

    def models(self, config: RunConfig, stage: str) -> list[UsedModel]:
        return self.engines(config, {*config.rollout.roles.values()} - {POLICY} if stage in SERVING_STAGES else ())

    def check(self, context: Context) -> list[str]:
        """Refuse roles that the environment does not have, models that the recipe does not have, models that cannot
        sample token ids, and a run without a role for the policy."""
        config, models = context.config, context.config.models
        if not config.rollout.roles:
            return []
        try:
            roles = roles_of(context.factory.make())
        except EnvError as error:
            raise refusal("env", "an environment that opens", str(error), "correct the environment") from error
        for role, name in config.rollout.roles.items():
            where = f"rollout.roles.{role}"
            if role not in roles:
                expected = f"a role of the environment ({', '.join(roles)})"
                raise refusal(where, expected, repr(role), "correct it, or add the role to the environment's roles")
            if name not in models:
                expected = f"a model of the recipe ({', '.join(sorted(models))})"
                raise refusal(where, expected, repr(name), f"add [models.{name}]")
            if name != POLICY:
                _check_model(config, where, name)
        played = models_by_role(config)
        if not set(roles) - played.keys():
            raise refusal("rollout.roles", "a role that the policy speaks for", "none", "leave one of them out")
        return [f"rollout: {name} speaks for the role {role}" for role, name in played.items()]


def _check_model(config: RunConfig, where: str, name: str) -> None:
    spec = config.models[name]
    if spec.path is None:
        raise refusal(f"models.{name}.path", f"the checkpoint that speaks for {where}", "none", "name one")
    if spec.served is not None and spec.served.kind == "chat":
        fix = 'serve it by "openai" or "remote", or leave out served'
        raise refusal(f"models.{name}.served.kind", "a server that samples token ids", '"chat"', fix)
    teacher_folder(config, name)


class RoleRecorder:
    """Recorder that opens the session of each role on the engine of its model: `policy` for every role that `by_role`
    does not name. Implements `SessionRecorder`."""

    def __init__(self, policy: SessionRecorder, by_role: Mapping[str, SessionRecorder]) -> None:
        self._policy = policy
        self._by_role = by_role

    @property
    def max_context(self) -> int | None:
        """Maximum number of tokens of a prompt of the policy and its reply together; None: replies are text."""
        return getattr(self._policy, "max_context", None)

    def open(self, task: Task, *, rollout_id: str, seed: int, role: str, admission: int) -> OpenSession:
        recorder = self._by_role.get(role, self._policy)
        return recorder.open(task, rollout_id=rollout_id, seed=seed, role=role, admission=admission)
