"""In-process chat loop: the world and its roles take turns until the world is done."""

from __future__ import annotations

from collections import defaultdict

from sparring.errors import BadInput, EnvError, boundary, refusal
from sparring.protocols import Episode
from sparring.types import Message


class ChatHarness:
    """Harness that runs a world as a chat. It opens the world; the caller scores and closes it. Implements
    `protocols.Harness`.

    A world of several roles says who replies next (`Observation.role`). Its messages go to that role's conversation,
    and the task's own to that of the first to reply."""

    async def run(self, episode: Episode) -> None:
        """Hold the conversation to its end.

        Raises:
            EnvError: the world raised an untyped error, returned neither an end nor a message, or asked for a
                constraint that does not compile.
            BadInput: a world of several roles does not name the one that replies next.
        """
        env, where = episode.env, f"environment {episode.task.env}, task {episode.task.id}"
        with boundary(EnvError, f"{where}: open"):
            observation = await env.open(episode.task, episode.box)
        role, said = observation.role or env.roles[0], defaultdict[str, list[Message]](list)
        said[role] += episode.task.messages
        while not observation.done:
            role = observation.role or (env.roles[0] if len(env.roles) == 1 else "")
            if role not in env.roles:
                do = "name it in each observation, or play the world by a harness of your own (rollout.harness)"
                expected = f"the role that replies next, one of {', '.join(env.roles)}"
                raise refusal(f"{where}: Observation.role", expected, repr(observation.role), do)
            messages = said[role]
            messages += observation.messages
            if not messages or messages[-1].role == "assistant":
                raise EnvError(f"{where}: expected the end or a message to reply to, got neither")
            session = episode.session(role)
            try:
                reply = await session.complete(messages, env.tools, constraint=observation.constraint)
            except BadInput as cause:  # the run's own constraint has been compiled before
                raise EnvError(f"{where}: constraint: {cause}") from cause
            messages.append(reply)
            with boundary(EnvError, f"{where}: step"):
                observation = await env.step(reply, role)
