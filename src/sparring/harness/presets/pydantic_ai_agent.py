"""pydantic-ai with a shell; the task comes on standard input."""

import os
import subprocess
import sys

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
agent = Agent(OpenAIChatModel(os.environ["MODEL"], provider=provider), system_prompt=os.environ.get("SYSTEM") or ())


@agent.tool_plain
def bash(command: str) -> str:
    """Run a shell command and return its output."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


print(agent.run_sync(sys.stdin.read(), usage_limits=UsageLimits(request_limit=None)).output)
