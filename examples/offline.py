"""Answer a list of prompts. Run: .venv/bin/python examples/offline.py"""
from penstock import LLM, SamplingParams


def main() -> None:
    prompts = ["The capital of France is", "Water boils at", "The opposite of hot is"]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM("demo") as llm:
        for result in llm.generate(prompts, params):
            print(f"{result.prompt!r} ->{result.outputs[0].text!r}")

        # Token ids work too, and several answers to one prompt share its pages.
        ids = llm.generate(prompts[0], params)[0].prompt_token_ids
        several = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=8)
        for output in llm.generate({"prompt_token_ids": ids}, several)[0].outputs:
            print(output.index, repr(output.text), output.finish_reason)


if __name__ == "__main__":
    main()
