"""What clients of an engine elsewhere ask of it."""

import asyncio

from sparring.generation import GenerateRequest, Sampling

PROMPT = (5, 6, 7, 8)
EVERYTHING = {
    "temperature": 0.7,
    "top_k": 9,
    "top_p": 0.9,
    "min_p": 0.01,
    "top_logprobs": 4,
    "logit_bias": ((3, 0.1),),
    "stop": (2,),
}


def ask(number=0, tokens=PROMPT, **sampling):
    settings = {"max_tokens": 8, "seed": number, **sampling}
    return GenerateRequest(id=f"r{number}", tokens=tokens, sampling=Sampling(**settings))


def with_client(engine, scenario):
    """Run `scenario(engine)` on an event loop, and close the engine."""

    async def main():
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(main())
