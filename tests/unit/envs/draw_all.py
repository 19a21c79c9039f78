"""Run in a process of its own: draws and scores one item of every reasoning-gym dataset, prints what came as JSON."""

from __future__ import annotations

import hashlib
import json

from reasoning_gym.factory import DATASETS

from sparring.envs.config import EnvConfig
from sparring.envs.reasoning_gym import ReasoningGym, item, score_answer
from sparring.types import Task

EXAMPLES = {
    # The library has no single answer to these, but an example of a right one.
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
PARAMS = {"composite": {"datasets": [{"name": "gcd", "weight": 1, "config": {}}]}}

datasets = [{"name": name, "params": PARAMS.get(name, {})} for name in sorted(DATASETS)]
ReasoningGym(EnvConfig(name="reasoning_gym", args={"datasets": datasets}))
found = {}
for dataset in datasets:
    name, params = dataset["name"], dataset["params"]
    entry = item(name, params, 0)
    task = Task(id=name, env="reasoning_gym", messages=(), data={"dataset": name, "params": params, "seed": 0})
    answer = EXAMPLES[name](entry["metadata"]) if name in EXAMPLES else entry["answer"]
    digest = hashlib.sha256(f"{entry['question']}\n{entry['answer']}".encode()).hexdigest()
    oracle = None if answer is None else score_answer(task, answer)
    found[name] = {"digest": digest, "oracle": oracle, "nonsense": score_answer(task, "?!")}
print(json.dumps(found))
