"""Repair: an agent program is told to repair a folder, in which a script says what is wrong next."""

from sparring.envs.base import Env
from sparring.types import Message, Score, ToolCall

NAMES = "abcdef"


class Repair(Env):
    """Worth 1 where each of six files is there if it should be, and not if it should not; else 0.

    One to three of them are wrong. `sh check` names the first, and after each repair the next; nothing else tells them.
    Of the demonstrations, which are right by luck as well, 0.4 check until all is well, 0.3 stop at the last repair
    without a check, and 0.3 never check: a policy that imitates them does as much.
    """

    needs_box = True

    def generate(self, random):
        names = random.sample(NAMES, len(NAMES))
        wanted = {name: random.random() < 0.5 for name in names}
        wrong = names[: random.randint(1, 3)]
        return {"prompt": "Repair the folder.", "wanted": wanted, "wrong": wrong, "luck": random.random()}

    def key(self, task):
        return f"{task.data['wanted']}, {task.data['wrong']}"

    async def open(self, task, box):
        opened = await super().open(task, box)
        wanted, wrong = task.data["wanted"], task.data["wrong"]
        for name in NAMES:
            if wanted[name] != (name in wrong):
                await box.write(name, b"")
        await box.write("check", "".join([*(_line(name, wanted[name]) for name in wanted), "echo ok\n"]).encode())
        return opened

    async def score(self, trajectory):
        listed = (await self.box.exec(["ls"])).stdout.split()
        right = all((name in listed) == wanted for name, wanted in self.task.data["wanted"].items())
        return Score(reward=float(right), success=right)

    def expert(self, task):
        wanted, luck = task.data["wanted"], task.data["luck"]
        repairs = [f"touch {name}" if wanted[name] else f"rm {name}" for name in task.data["wrong"]]
        commands = repairs if luck < 0.3 else [word for repair in repairs for word in ("sh check", repair)]
        if luck >= 0.6:
            commands.append("sh check")

        def reply(messages):
            done = sum(message.role == "tool" for message in messages)
            if done == len(commands):
                return Message(role="assistant", content="Done.")
            call = ToolCall(id=f"call_{done}", name="bash", arguments={"command": commands[done]})
            return Message(role="assistant", tool_calls=(call,))

        return reply


def _line(name, wanted):
    """Return the line of the script that looks for one file."""
    looks = f"[ -e {name} ] ||" if wanted else f"[ ! -e {name} ] ||"
    return f"{looks} {{ echo {'missing' if wanted else 'extra'}: {name}; exit; }}\n"
