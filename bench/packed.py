"""The demo's weights in several types, decoded by penstock and by llama.cpp in turns.

Makes GGUF files of the demo model with its weights as F16, Q8_0 and Q4_0 beside the original (Q4_1) in a
folder, starts one engine for each (`--dtype gguf` for blocks, bfloat16 and float32 of the original), and asks
all arms for the same tokens, round by round. llama.cpp takes part if `xllamacpp` can be imported (it is not a
dependency: pip install --target FOLDER --no-deps xllamacpp, and PYTHONPATH). It multiplies in int8, penstock
does not.

    python bench/packed.py --threads 2 --rounds 5
"""
from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from penstock import LLM, SamplingParams
from penstock.model.source.demo import fetch_demo

PROMPT = list(range(100, 164))
LONG = list(range(200, 712))
TYPES = {"F16": GGMLQuantizationType.F16, "Q8_0": GGMLQuantizationType.Q8_0,
         "Q4_0": GGMLQuantizationType.Q4_0}


def remake(path: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """The file with all of its quantised tensors as `kind`, and every key as it was."""
    reader = GGUFReader(path)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for key, found in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        sub = found.types[-1] if found.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(key, found.contents(), found.types[0], sub_type=sub)
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.tensor_type is GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, np.asarray(data))
            continue
        floats = dequantize(np.asarray(data), tensor.tensor_type)
        writer.add_tensor(tensor.name, quantize(floats, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Arm = Callable[[list[int], int], float]         # (prompt, new tokens) -> seconds


def ours(model: str, dtype: str, threads: int) -> Arm:
    llm = LLM(model, dtype=dtype, threads=threads, kv_cache_memory_bytes="128M", prefix_cache=False)

    def once(prompt: list[int], new: int) -> float:
        started = time.perf_counter()
        llm.generate({"prompt_token_ids": prompt},
                     SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))
        return time.perf_counter() - started
    return once


def llama(path: Path, threads: int) -> Arm:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cpuparams.poll = 0               # its threads do not spin while another arm runs
    server = xllamacpp.Server(params)

    def once(prompt: list[int], new: int) -> float:
        started = time.perf_counter()
        answer = server.handle_completions({"prompt": prompt, "n_predict": new, "temperature": 0.0,
                                            "ignore_eos": True, "cache_prompt": False})
        seconds = time.perf_counter() - started
        assert answer, "llama.cpp did not answer"
        return seconds
    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = {"Q4_1": fetch_demo()}
        for name, kind in TYPES.items():
            files[name] = Path(folder) / f"{name}.gguf"
            remake(files["Q4_1"], files[name], kind)
        arms: dict[str, Arm] = {f"penstock {dtype}": ours("demo", dtype, args.threads)
                                for dtype in ("float32", "bfloat16")}
        arms |= {f"penstock {name}": ours(str(path), "gguf", args.threads)
                 for name, path in files.items() if name != "F16"}
        try:
            arms |= {f"llama.cpp {name}": llama(path, args.threads) for name, path in files.items()}
        except ImportError as why:
            print(f"without llama.cpp: {why}")
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for round_ in range(args.rounds + 1):
            for name, arm in arms.items():
                first, whole, long = arm(PROMPT, 1), arm(PROMPT, 1 + args.new), arm(LONG, 1)
                if round_:
                    seconds[name].append(((whole - first) / args.new, long))
        base = seconds["penstock bfloat16"]
        print(f"{'':<20}{'tokens/s':>10}{'of bfloat16, by round':>28}{'prefill 512, tokens/s':>24}")
        for name, taken in seconds.items():
            ratios = sorted(b[0] / t[0] for b, t in zip(base, taken, strict=True))
            print(f"{name:<20}{1 / statistics.median(t for t, _ in taken):>10.1f}"
                  f"{f'{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})':>28}"
                  f"{len(LONG) / statistics.median(p for _, p in taken):>24.0f}")


if __name__ == "__main__":
    main()
