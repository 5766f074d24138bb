"""Chat with history: the second turn finds the first one in the prefix cache."""
from penstock import LLM, SamplingParams


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30)
    messages = [{"role": "system", "content": "You are a geography teacher who answers briefly."}]
    with LLM("demo") as llm:
        for question in ("What is the capital of France?", "And of Italy?"):
            messages.append({"role": "user", "content": question})
            [result] = llm.chat(messages, params)
            answer = result.outputs[0].text
            messages.append({"role": "assistant", "content": answer})
            print(f"Q: {question}\nA: {answer}")
            print(f"   {result.num_cached_tokens} of {len(result.prompt_token_ids)} prompt tokens "
                  "came from the cache")


if __name__ == "__main__":
    main()
