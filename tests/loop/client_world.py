"""A harness that is somebody else's program: OpenAI's client, which is told an address and a key."""

from __future__ import annotations

from typing import Any

import openai

from sparring.gateway.server import open_door
from sparring.protocols import Episode
from sparring.types import Message, ToolCall


async def whole(stream: Any) -> dict[str, Any]:
    """Put the pieces of a streamed reply together; return it as a message, with its finish reason beside it."""
    content, calls, finish = "", {}, None
    async for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for piece in choice.delta.tool_calls or ():
            call = calls.setdefault(
                piece.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] += piece.id or ""
            call["function"]["name"] += piece.function.name or ""
            call["function"]["arguments"] += piece.function.arguments or ""
        finish = choice.finish_reason or finish
    message = {"role": "assistant", "content": content, **({"tool_calls": list(calls.values())} if calls else {})}
    return {"message": message, "finish_reason": finish}


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
        streams = True
        while True:
            reply: Any = await client.chat.completions.create(
                model="policy", messages=messages, tools=tools or openai.omit, stream=streams
            )
            choice = await whole(reply) if streams else reply.choices[0].model_dump(exclude_none=True)
            streams = not streams
            message = choice["message"]
            messages.append(message)
            calls = tuple(
                ToolCall(id=call["id"], name=call["function"]["name"], arguments={"code": "print(1)"})
                for call in message.get("tool_calls", ())
            )
            answer = await episode.env.step(
                Message(role="assistant", content=message.get("content") or "", tool_calls=calls)
            )
            if answer.done or choice["finish_reason"] == "length":
                return
            messages += [
                {"role": m.role, "content": m.content, **({"tool_call_id": m.tool_call_id} if m.role == "tool" else {})}
                for m in answer.messages
            ]


async def bringing(episode: Episode) -> None:
    """Ask once, with a tool that the world does not have."""
    opened = await episode.env.open(episode.task, episode.box)
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    tool: Any = {"type": "function", "function": {"name": "peek", "description": "Looks.", "parameters": parameters}}
    async with (
        open_door(episode.session()) as door,
        openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key) as client,
    ):
        messages: Any = [{"role": m.role, "content": m.content} for m in (*episode.task.messages, *opened.messages)]
        await client.chat.completions.create(model="policy", messages=messages, tools=[tool])
