"""Environment of a folder, for harnesses that run programs: it writes a question into the box and reads the answer from
a file."""

from __future__ import annotations

from sparring.protocols import Boxes, Sandbox
from sparring.testing.toy import ToyTasks
from sparring.types import Limits, Message, Observation, Score, Task, ToolSpec, Trajectory

QUESTION, ANSWER = "question.txt", "answer.txt"


def folder_task(answer: str = "42", *, prompt: str = "Do it.", limits: Limits = Limits()) -> Task:
    """Return the task to write a text into `answer.txt`."""
    message = Message(role="user", content=prompt)
    return Task(id=f"folder/{answer}", env="folder", messages=(message,), data={"answer": answer}, limits=limits)


class FolderEnv:
    """One question. The reward is 1 for the right answer in the folder, else 0.

    Args:
        tools: tools of the environment, which answer with the arguments of their call.
    """

    def __init__(self, tools: tuple[ToolSpec, ...] = ()) -> None:
        self.tools = tools
        self._box: Sandbox | None = None
        self._answer = ""

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        """Write the question into the box."""
        assert box is not None, "a program has a box"
        self._box, self._answer = box, task.data["answer"]
        await box.write(QUESTION, f"Write {self._answer} into {ANSWER}.\n".encode())
        return Observation()

    async def step(self, reply: Message) -> Observation:
        """Answer the calls of a reply; a reply without calls ends the task."""
        answers = [
            Message(role="tool", content=f"{call.name}: {dict(call.arguments or {})}", tool_call_id=call.id)
            for call in reply.tool_calls
        ]
        return Observation(messages=tuple(answers), done=not answers)

    async def score(self, trajectory: Trajectory) -> Score | None:
        """Return 1 for the right answer, else 0."""
        assert self._box is not None, "scored after it was opened"
        try:
            right = (await self._box.read(ANSWER)).decode(errors="replace").strip() == self._answer
        except FileNotFoundError:
            right = False
        return Score(reward=float(right), success=right)

    async def close(self) -> None:
        """Do nothing: the box is the rollout's."""


class FolderWorld:
    """Environments of folders. Implements `EnvFactory`.

    Args:
        tools: tools of every environment.
    """

    name = "folder"
    scorer = None

    def __init__(self, tools: tuple[ToolSpec, ...] = ()) -> None:
        self._tools = tools

    def make(self) -> FolderEnv:
        return FolderEnv(self._tools)

    async def prove(self, boxes: Boxes) -> tuple[int, int]:
        """Return zeros: there is no file with rows to prove."""
        return 0, 0

    def tasks(self, split: str, seed: int) -> FolderTasks:
        return FolderTasks()

    def expert(self, task: Task) -> None:
        """Return None: programs have no expert."""


class FolderTasks(ToyTasks):
    """Endless tasks of the folder world."""

    def __init__(self) -> None:
        super().__init__("train", None)

    def next(self) -> Task | None:
        """Return the next task."""
        self._next += 1
        return folder_task(str(self._next))
