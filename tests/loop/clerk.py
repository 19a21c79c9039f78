"""An agent program in a few lines of the standard library: a system prompt and one tool of its own, `sh`. With COMPACTS
in its environment it begins anew where it is told that its prompt is too long."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

system = {"role": "system", "content": "You are a clerk."}
messages = [system, {"role": "user", "content": sys.argv[1]}]
parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "sh", "description": "Run.", "parameters": parameters}}]
while True:
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            reply = json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as refused:
        too_long = json.load(refused)["error"]["code"] == "context_length_exceeded"
        if "COMPACTS" not in os.environ or not too_long or len(messages) == 2:
            raise
        messages = [system, {"role": "user", "content": "It was too long. " + sys.argv[1]}]
        continue
    messages.append(reply)
    for call in reply.get("tool_calls") or ():
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], check=False, capture_output=True, text=True)
        said = done.stdout + done.stderr or "nothing"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    if not reply.get("tool_calls"):
        break
