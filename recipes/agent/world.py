"""Repair: an agent program is told to repair a folder, in which a script says what is wrong next."""

import hashlib
import itertools

from sparring.envs.base import Env
from sparring.errors import SpoiltFile
from sparring.types import Message, Score, ToolCall

NAMES = "abcdef"
CHECK = """state=$(for name in {names}; do if [ -f $name ] && [ ! -L $name ]; then echo $name; fi; done)
digest() {{ echo {salt} $1 $state | sha256sum | cut -c 1-8; }}
here=$(digest a)
while read key word; do
  if [ $key = $here ]; then
    number=$(( 0x$word ^ 0x$(digest b) ))
    set -- ok {words}
    shift $number
    echo $1 | tr _ ' '
  fi
done <<'END'
{table}
END
"""
"""A table of every state of the folder. Both columns are digests, so reading it tells nothing: what is wrong is said of
the state that is there."""


class Repair(Env):
    """Worth 1 where each of six files is there if it should be, and not if it should not; else 0.

    One to three of them are wrong. `sh check` names the first, and after each repair the next; the script's text names
    none. Whoever runs it in a loop that obeys it has repaired the folder by what it said. What counts is what of the six
    names reaches a verifier when the program has ended: a file counts, whatever is in it; another name does not. A
    folder or a link in a file's place is worth 0. No program runs.

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

    async def prepare(self, task, box):
        wanted, wrong = task.data["wanted"], task.data["wrong"]
        for name in NAMES:
            if wanted[name] != (name in wrong):
                await box.write(name, b"")
        await box.write("check", _check(wanted, salt=f"{task.seed:x}").encode())

    async def score(self, trajectory):
        try:
            assert self.box is not None
            verifier = await self.box.verifier(list(NAMES))
        except SpoiltFile:
            return Score(reward=0.0, success=False)
        entries = await verifier.entries()
        await verifier.close()
        right = all((entries.get(name) == "file") == wanted for name, wanted in self.task.data["wanted"].items())
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


def _check(wanted, salt):
    """Return the script that says what is wrong first."""
    words = ["ok", *(f"{word}:_{name}" for name in NAMES for word in ("missing", "extra"))]
    table = []
    for present in itertools.product((False, True), repeat=len(NAMES)):
        state = dict(zip(NAMES, present, strict=False))
        first = next((name for name in wanted if state[name] != wanted[name]), None)
        said = "ok" if first is None else f"{'missing' if wanted[first] else 'extra'}:_{first}"
        names = " ".join(name for name in NAMES if state[name])
        key, mask = (_digest(salt, column, names) for column in "ab")
        table.append(f"{key} {int(mask, 16) ^ words.index(said):08x}")
    return CHECK.format(names=" ".join(NAMES), salt=salt, words=" ".join(words[1:]), table="\n".join(sorted(table)))


def _digest(salt, column, names):
    """Return the first eight digits of what `digest` of the script computes."""
    return hashlib.sha256(f"{salt} {column} {names}".rstrip().encode() + b"\n").hexdigest()[:8]
