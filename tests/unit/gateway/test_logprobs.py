"""Log-probabilities by the vendor's own client: together, the bytes of the ids are those of the reply."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from sessions import RENDERER, opened, said, says

from sparring.gateway.server import open_door

TEXT = "Grüße, 世界 🙂!"


def test_a_character_that_is_split_over_ids_has_its_bytes() -> None:
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
