"""Ask BFCL's checker about every reply of the expert: `python recipes/bfcl/prove.py`. It counts what is right and names
what is not."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

from sparring.envs.config import EnvConfig
from sparring.envs.registry import load_env
from sparring.types import Message


async def main() -> int:
    """Print the counts; return 1 where a reply is not right."""
    factory: Any = load_env(EnvConfig(name="recipes/bfcl/world.py:Calls"))
    wrong, right = list[str](), Counter[str]()
    for side in (factory.train, factory.held_out):
        for task in side:
            reply: Message = factory.expert(task)(task.messages)
            score = await factory.judged(task, reply)
            if score.success:
                right[task.tag] += 1
            else:
                wrong.append(task.data["id"])
    factory.checker.close()
    print(f"{len(factory.train)} tasks for training, {len(factory.held_out)} held out, {factory.left_out} too long")
    print(f"right by BFCL: {sum(right.values())} replies of the expert, {dict(right)}")
    print(f"not right: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
