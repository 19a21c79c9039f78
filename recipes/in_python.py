"""A recipe built in Python, trained, evaluated and drawn: python recipes/in_python.py [STEPS]"""

import sys
import webbrowser

from msgspec.structs import replace

from sparring import check, evaluate, load_recipe, run

STEPS = int(sys.argv[1]) if sys.argv[1:] else 60

config = load_recipe("recipes/quickstart.toml", {"run.name": f"in-python-{STEPS}", "run.memory": "warn"})
config = replace(config, sft=replace(config.sft, steps=10 * STEPS), rl=replace(config.rl, steps=STEPS))
config = replace(config, eval=replace(config.eval, tasks=10 * STEPS, no_tool_tasks=0))

print(*check(config), sep="\n")
folder = run(config)  # stopped, the same line goes on where it was

results = evaluate(config, folder / "sft/model", folder / "rl/model", tasks=10 * STEPS)
for name, result in zip(("before", "after"), results.evaluations, strict=True):
    print(name, result.evaluation.success.value, result.evaluation.success.interval)
if results.comparison is not None:
    print("change", results.comparison.changes["success"].value)

webbrowser.open((folder / "report.html").absolute().as_uri())  # the curves of every metric, and the rollouts
