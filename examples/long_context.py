"""A prompt that is longer than the device pool: decode reads 256 tokens of it at a time, from host pages."""
from penstock import LLM, SamplingParams

STORY = "The road went on along the river and past the old mill. " * 50

with LLM("demo", sparse_top_k=256, kv_cache_memory_bytes="20M", kv_offloading_size="100M", max_num_seqs=2) as llm:
    [result] = llm.generate(STORY + "The road", SamplingParams(temperature=0.0, max_tokens=8))
    print(f"{len(result.prompt_token_ids)} tokens of prompt, then: {result.outputs[0].text!r}")
    print("units that decode read:", result.kv_reads)
