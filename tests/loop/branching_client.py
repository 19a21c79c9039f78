"""A harness that is somebody else's program with a sub-agent: it starts one, goes on, and hears the sub-agent last."""

from __future__ import annotations

from typing import Any

import openai

from sparring.gateway.server import open_door
from sparring.protocols import Episode
from sparring.types import Message, ToolCall

SUB_AGENT = {"x-claude-code-agent-id": "sub"}
SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": "Searches.", "parameters": {"type": "object", "properties": {}}},
}


async def agent(episode: Episode) -> None:
    """Let the model use its tool, answer, and take up what the sub-agent says."""
    opened = await episode.env.open(episode.task, episode.box)
    tools = [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": dict(t.parameters)},
        }
        for t in episode.env.tools
    ]
    async with (
        open_door(episode.session()) as door,
        openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key) as client,
    ):

        async def ask(messages: list[Any], tools: list[Any], **more: Any) -> Any:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools, **more)  # type: ignore[arg-type]
            return answer.choices[0].message

        talk: list[Any] = [{"role": m.role, "content": m.content} for m in (*episode.task.messages, *opened.messages)]
        while True:
            reply = await ask(talk, tools)
            talk.append(reply.model_dump(exclude_none=True))
            calls = tuple(
                ToolCall(id=call.id, name=call.function.name, arguments={"code": "print(1)"})
                for call in reply.tool_calls or ()
            )
            step = await episode.env.step(Message(role="assistant", content=reply.content or "", tool_calls=calls))
            if step.done or not calls:
                break
            talk += [{"role": m.role, "content": m.content, "tool_call_id": m.tool_call_id} for m in step.messages]
        await ask([{"role": "user", "content": "Search for it in the background."}], [SEARCH], extra_headers=SUB_AGENT)
