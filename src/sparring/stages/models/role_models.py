"""Roles of the environment that another model of the recipe speaks for: a simulated user, a fixed opponent."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.envs.roles import roles_of
from sparring.errors import EnvError, refusal
from sparring.model.hub import base_folder
from sparring.protocols import Engine, Store
from sparring.record.recorder import Recorder
from sparring.record.session import OpenSession
from sparring.render.load import load_renderer
from sparring.rollout.episode import SessionRecorder
from sparring.stages.context import POLICY, Context
from sparring.stages.models.teachers import room_of, teacher_folder
from sparring.types import Task


def open_role_engines(context: Context) -> dict[str, Engine]:
    """Make an engine of every model but the policy that `[rollout] roles` names, by the model's name."""
    names = sorted(set(served_elsewhere(context).values()))
    return {name: context.cluster.engine(name, path=str(teacher_folder(context, name))) for name in names}


def served_elsewhere(context: Context) -> dict[str, str]:
    """Return the model of each role that the policy does not speak for."""
    rollout = context.config.rollout
    return {role: name for role, name in rollout.roles.items() if not rollout.speaks(role)}


def with_roles(
    context: Context, recorder: SessionRecorder, engines: Mapping[str, Engine], store: Store | None = None
) -> SessionRecorder:
    """Return the recorder of all roles: those of `[rollout] roles` speak by the model that is named there.

    Args:
        recorder: of every other role.
        engines: of `open_role_engines`.
        store: keeps the turns; None keeps them in memory only.
    """
    config, by_role = context.config, served_elsewhere(context)
    recorders = {
        name: Recorder(
            engine,
            load_renderer(
                base_folder(teacher_folder(context, name)),
                config.models[name].renderer,
                config.models[name].thinking,
                config.render.control_tokens,
                config.render.thoughts,
            ),
            store,
            sampling=config.rollout.sampling(),
            model=name,
            max_context=room_of(context, name),
        )
        for name, engine in engines.items()
    }
    if not by_role:
        return recorder
    return RoleRecorder(recorder, {role: recorders[name] for role, name in by_role.items()})


def check_roles(context: Context) -> list[str]:
    """Check that every role of `[rollout] roles` is one of the environment and that a model of the recipe serves it.

    Returns:
        A sentence for each role that another model than the policy speaks for.

    Raises:
        BadInput: a role or a model is not there, the model cannot sample here, or no role is left to the policy.
    """
    wanted, models = context.config.rollout.roles, context.config.models
    if not wanted:
        return []
    try:
        roles = roles_of(context.factory.make())
    except EnvError as error:
        raise refusal("env", "an environment that opens", str(error), "correct the environment") from error
    for role, name in wanted.items():
        where = f"rollout.roles.{role}"
        if role not in roles:
            expected = f"a role of the environment ({', '.join(roles)})"
            raise refusal(where, expected, repr(role), "correct it, or add the role to the environment's roles")
        if name not in models:
            expected = f"a model of the recipe ({', '.join(sorted(models))})"
            raise refusal(where, expected, repr(name), f"add [models.{name}]")
        if name != POLICY:
            _check_model(context, where, name)
    if not set(roles) - served_elsewhere(context).keys():
        raise refusal("rollout.roles", "a role that the policy speaks for", "none", "leave one of them out")
    return [f"rollout: {name} speaks for the role {role}" for role, name in served_elsewhere(context).items()]


def _check_model(context: Context, where: str, name: str) -> None:
    """Check that a model can sample token ids: there is a checkpoint, and a server of it takes ids."""
    spec = context.config.models[name]
    if spec.path is None:
        raise refusal(f"models.{name}.path", f"the checkpoint that speaks for {where}", "none", "name one")
    if spec.served is not None and spec.served.kind == "chat":
        do = 'serve it by "openai" or "remote", or leave out served'
        raise refusal(f"models.{name}.served.kind", "a server that samples token ids", '"chat"', do)
    teacher_folder(context, name)


class RoleRecorder:
    """Recorder that opens the session of each role on the engine of the model that speaks for it. Implements
    `SessionRecorder`.

    Args:
        policy: recorder of every role that `by_role` does not name.
        by_role: recorder of each of the others.
    """

    def __init__(self, policy: SessionRecorder, by_role: Mapping[str, SessionRecorder]) -> None:
        self._policy = policy
        self._by_role = by_role

    @property
    def max_context(self) -> int | None:
        """Most ids that a prompt of the policy and its reply may have together; None where replies are text."""
        return getattr(self._policy, "max_context", None)

    def open(self, task: Task, *, rollout_id: str, seed: int, role: str, admission: int) -> OpenSession:
        recorder = self._by_role.get(role, self._policy)
        return recorder.open(task, rollout_id=rollout_id, seed=seed, role=role, admission=admission)
