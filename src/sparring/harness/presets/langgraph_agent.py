"""langgraph's agent with a shell. argv: chat_completions or messages; the task comes on standard input."""

import os
import subprocess
import sys

from langchain_core.tools import tool
from langgraph.prebuilt import create_react_agent


@tool
def bash(command: str) -> str:
    """Run a shell command and return its output."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


url, key, name = (os.environ[each] for each in ("BASE_URL", "API_KEY", "MODEL"))
if sys.argv[1] == "messages":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=name, base_url=url, api_key=key, max_tokens=int(os.environ["REPLY"]))
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=name, base_url=url, api_key=key)
agent = create_react_agent(model, [bash], prompt=os.environ.get("SYSTEM") or None)
messages = {"messages": [("user", sys.stdin.read())]}
print(agent.invoke(messages, {"recursion_limit": 1000})["messages"][-1].text)
