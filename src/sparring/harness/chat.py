"""The in-process chat loop: the world speaks, the policy replies, until the world is done."""

from __future__ import annotations

from sparring.errors import BadInput, EnvError, boundary
from sparring.protocols import Episode


class ChatHarness:
    """Runs a world as a chat. It opens the world; whoever made the world scores and closes it."""

    async def run(self, episode: Episode) -> None:
        """Hold the conversation to its end.

        Raises:
            LimitReached: a limit of the task was hit.
            EngineError: the engine failed.
            EnvError: the world raised something untyped, neither ended nor said anything, or asked for what does not
                compile.
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
            except BadInput as cause:  # the run's own constraint was tried before the run
                raise EnvError(f"{where}: constraint: {cause}") from cause
            with boundary(EnvError, f"{where}: step"):
                observation = await env.step(reply)
            messages += [reply, *observation.messages]
