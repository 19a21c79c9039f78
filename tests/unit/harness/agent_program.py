"""An agent in a few lines of the standard library: chat completions, one tool that runs a shell command."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

mode = sys.argv[1]
messages = [{"role": "user", "content": sys.argv[2]}]
tools = [
    {
        "type": "function",
        "function": {
            "name": "sh",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]


def reply(**fields: object) -> dict:
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages, "tools": tools, **fields}).encode()
    headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def work() -> str:
    while True:
        message = reply()
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            done = subprocess.run(
                json.loads(call["function"]["arguments"])["command"],
                shell=True,
                check=False,
                capture_output=True,
                text=True,
            )
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})


if mode == "shows its prompt":
    reply()
    print("{prompt} {system}")
    print(sys.argv[2])
if mode == "is refused":
    reply(n=0)
if mode == "says too much":
    messages[0]["content"] = "word " * 5000
    reply()
if mode == "silent":
    print("I have nothing to ask.", file=sys.stderr)
    sys.exit(3)
if mode == "sleeps":
    reply()
    time.sleep(3600)
if mode == "never ends":
    while True:
        try:
            messages = messages[:1]
            reply()
        except urllib.error.HTTPError:
            pass
if mode == "floods":
    reply()
    try:
        with open("big", "wb") as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError as error:
        print(error)
    print("x" * (10 << 20))
    sys.exit(5)
if mode == "leaves children":
    reply()
    for _ in range(3):
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
if mode == "looks around":
    print(sorted(os.environ))
    print(os.getcwd(), os.listdir(), os.environ["HOME"], os.path.exists("/root"))
    try:
        socket.create_connection(("10.255.255.1", 80), timeout=5)
    except OSError as error:
        print(type(error).__name__)
print(work() if mode in ("works", "looks around") else "done")
