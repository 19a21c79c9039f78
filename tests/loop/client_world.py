"""A harness that is somebody else's program: OpenAI's client, which is told an address and a key."""

from __future__ import annotations

from typing import Any

import openai

from sparring.gateway.server import open_door
from sparring.protocols import Episode
from sparring.types import Message, ToolCall


async def agent(episode: Episode) -> None:
    """Call tools until the model stops calling them."""
    opened = await episode.env.open(episode.task, episode.box)
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in episode.env.tools
    ]
    async with (
        open_door(episode.session()) as door,
        openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key) as client,
    ):
        messages: list[Any] = [
            {"role": message.role, "content": message.content} for message in (*episode.task.messages, *opened.messages)
        ]
        while True:
            stream: Any = await client.chat.completions.create(
                model="policy", messages=messages, tools=tools or openai.omit, stream=len(messages) % 2 == 0
            )
            said = await whole(stream) if len(messages) % 2 == 0 else stream.choices[0]
            messages.append(said.message.model_dump(exclude_none=True))
            calls = tuple(
                ToolCall(id=call.id, name=call.function.name, arguments={"code": "print(1)"})
                for call in said.message.tool_calls or ()
            )
            answer = await episode.env.step(
                Message(role="assistant", content=said.message.content or "", tool_calls=calls)
            )
            if answer.done or said.finish_reason == "length":
                return
            messages += [
                {"role": m.role, "content": m.content, **({"tool_call_id": m.tool_call_id} if m.role == "tool" else {})}
                for m in answer.messages
            ]
