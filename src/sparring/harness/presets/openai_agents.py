"""openai-agents with a shell. argv: chat_completions or responses; the task comes on standard input."""

import os
import subprocess
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def bash(command: str) -> str:
    """Run a shell command and return its output."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
kind = {"chat_completions": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[sys.argv[1]]
model = kind(model=os.environ["MODEL"], openai_client=client)
agent = Agent(name="agent", instructions=os.environ.get("SYSTEM") or None, tools=[bash], model=model)
print(Runner.run_sync(agent, sys.stdin.read(), max_turns=1000).final_output)
