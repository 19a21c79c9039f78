"""In-process chat loop: the world and the policy take turns until the world is done."""

from __future__ import annotations

from sparring.errors import BadInput, EnvError, boundary
from sparring.protocols import Episode


class ChatHarness:
    """Harness that runs a world as a chat. It opens the world; the caller scores and closes it. Implements
    `protocols.Harness`."""

    async def run(self, episode: Episode) -> None:
        """Hold the conversation to its end.

        Raises:
            EnvError: the world raised an untyped error, returned neither an end nor a message, or asked for a
                constraint that does not compile.
        """
        env, session = episode.env, episode.session()
        where = f"environment {episode.task.env}, task {episode.task.id}"
        with boundary(EnvError, f"{where}: open"):
            observation = await env.open(episode.task, episode.box)
        messages = [*episode.task.messages, *observation.messages]
        while not observation.done:
            if not messages or messages[-1].role == "assistant":
                raise EnvError(f"{where}: expected the end or a message to reply to, got neither")
            try:
                reply = await session.complete(messages, env.tools, constraint=observation.constraint)
            except BadInput as cause:  # the run's own constraint has been compiled before
                raise EnvError(f"{where}: constraint: {cause}") from cause
            with boundary(EnvError, f"{where}: step"):
                observation = await env.step(reply)
            messages += [reply, *observation.messages]
