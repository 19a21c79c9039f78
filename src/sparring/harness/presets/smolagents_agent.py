"""smolagents' agent that calls tools, with a shell; the task comes on standard input."""

import os
import subprocess
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def bash(command: str) -> str:
    """Run a shell command and return its output.

    Args:
        command: to run.
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


model = OpenAIModel(  # the policy decides whether it calls a tool
    model_id=os.environ["MODEL"],
    api_base=os.environ["BASE_URL"],
    api_key=os.environ["API_KEY"],
    tool_choice="auto",
)
print(ToolCallingAgent(tools=[bash], model=model, max_steps=1000).run(sys.stdin.read()))
