"""An agent program in a few lines of the standard library: a system prompt and one tool of its own, `sh`."""

import json
import os
import subprocess
import sys
import urllib.request

messages = [{"role": "system", "content": "You are a clerk."}, {"role": "user", "content": sys.argv[1]}]
parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "sh", "description": "Run.", "parameters": parameters}}]
while True:
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        reply = json.load(answer)["choices"][0]["message"]
    messages.append(reply)
    for call in reply.get("tool_calls") or ():
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], check=False, capture_output=True, text=True)
        said = done.stdout + done.stderr or "nothing"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    if not reply.get("tool_calls"):
        break
