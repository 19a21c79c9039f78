"""Log-probabilities by the vendor's own client: together, the bytes of the ids are those of the reply."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from sessions import ADD, RENDERER, ids_agree, opened, said, says
from suite import short_of

from sparring.gateway.server import open_door

TEXT = "Grüße, 世界 🙂!"


@pytest.mark.full
def test_a_character_of_several_ids_has_its_bytes() -> None:
    async def main() -> Any:
        session = opened(says(*[said(TEXT)] * 4))
        async with open_door(session) as door:
            async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key, max_retries=0) as client:
                asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
                whole = await client.chat.completions.create(**asked)
                stream = await client.chat.completions.create(**asked, stream=True)
                streamed = [
                    token
                    async for chunk in stream
                    for choice in chunk.choices
                    for token in (choice.logprobs.content or [] if choice.logprobs else [])
                ]
                asked = {"model": "policy", "input": "Hi", "include": ["message.output_text.logprobs"]}
                response = await client.responses.create(**asked)
                async with client.responses.stream(**asked) as events:
                    response_streamed = await events.get_final_response()
        listed = [whole.choices[0].logprobs.content, streamed]
        listed += [each.output[0].content[0].logprobs for each in (response, response_streamed)]
        return listed, [segment.tokens for segment in session.segments if segment.model is not None]

    listed, sampled = asyncio.run(main())
    assert any("\N{REPLACEMENT CHARACTER}" in RENDERER.decode([token]) for token in sampled[0]), "a split character"
    for tokens, ids in zip(listed, sampled, strict=True):
        data = b"".join(bytes(token.bytes) for token in tokens)
        assert data == RENDERER.decode(ids).encode() and data.startswith(TEXT.encode())
        assert [token.token for token in tokens] == [RENDERER.decode([token]) for token in ids]


@pytest.mark.parametrize("content", short_of(["I do.", ""], ["I do."]))
def test_responses_list_every_id_including_calls(content: str) -> None:
    """A call is sampled too: its ids are in the list of the message, which has no text where the reply says nothing."""
    reply = said(content, ("add", {"a": 1, "b": 2}))
    engine = says(reply, reply, *[said("Bye.")] * 4)
    session = opened(engine)
    asked: Any = {"model": "policy", "include": ["message.output_text.logprobs"]}
    asked["tools"] = [{"type": "function", **ADD["function"]}]

    async def main() -> None:
        async with (
            open_door(session) as door,
            openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key, max_retries=0) as client,
        ):
            whole = await client.responses.create(input="Hi", **asked)
            async with client.responses.stream(input="Hi", **asked) as events:
                done = [event.item async for event in events if event.type == "response.output_item.done"]
                streamed = await events.get_final_response()
            for answer in (whole, streamed):
                message, call = answer.output
                assert (message.content[0].text, call.name) == (content, "add")
                assert len(message.content[0].logprobs) == answer.usage.output_tokens == len(session.segments[1].tokens)
                output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
                history: Any = [{"role": "user", "content": "Hi"}, *answer.output, output]
                await client.responses.create(input=history, **asked)
                references: Any = [{"type": "item_reference", "id": item.id} for item in answer.output]
                await client.responses.create(input=[history[0], *references, output], **asked)
            assert [item.id for item in done] == [item.id for item in streamed.output]
            assert done[0].content[0].logprobs == streamed.output[0].content[0].logprobs

    asyncio.run(main())
    assert sum(segment.parent is None for segment in session.segments) == 1 and ids_agree(session, engine)
