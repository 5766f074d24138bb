"""Stream answers: from plain code, then several at once with asyncio."""
import asyncio

from penstock import LLM, AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=16)


def from_plain_code() -> None:
    with LLM("demo") as llm:
        for delta in llm.stream("Once upon a time", PARAMS):
            print(delta.text, end="", flush=True)
        print()


async def with_asyncio() -> None:
    async def show(llm: AsyncLLM, name: str, prompt: str) -> None:
        async for delta in llm.stream(prompt, PARAMS):
            print(f"[{name}] {delta.text!r}", flush=True)

    async with AsyncLLM("demo") as llm:
        await asyncio.gather(show(llm, "a", "The river"), show(llm, "b", "The mountain"))


if __name__ == "__main__":
    from_plain_code()
    asyncio.run(with_asyncio())
