"""The demo's weights in several types, decoded by penstock and by llama.cpp in turns.

Makes GGUF files of the demo model with its weights as F16, Q8_0 and Q4_0 beside the original (Q4_1) in a
folder, starts one engine for each (`--dtype gguf` for blocks, bfloat16 and float32 of the original), and asks
all arms for the same tokens, round by round: one stream and eight, prompts of 512 and 2,000 tokens. llama.cpp
takes part if `xllamacpp` can be imported (it is not a dependency: pip install --target FOLDER --no-deps xllamacpp,
and PYTHONPATH). It multiplies in int8, penstock does not.

    python bench/packed.py --threads 2 --rounds 5 [--types Q4_0 Q8_0] [--output-json FILE]

On a machine that others use, `--threads 1 --clock processor`: tokens by the processor time of both sides.
"""
from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from penstock import LLM, SamplingParams
from penstock.bench.report import Spread, table, write_json
from penstock.config.base.machine import probe
from penstock.model.source.demo import fetch_demo

STREAMS = 8
PROMPTS = [list(range(100 + 70 * i, 164 + 70 * i)) for i in range(STREAMS)]
LONG, LONGEST = list(range(200, 712)), list(range(300, 2300))
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


Arm = Callable[[list[list[int]], int], float]   # (prompts, new tokens of each) -> seconds


def processor_s() -> float:
    """Processor time so far of this process and those that it started, in seconds."""
    mine, parents = {str(os.getpid())}, dict[str, str]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):                 # ended meanwhile
            parents[stat.parent.name] = stat.read_text().rpartition(")")[2].split()[1]
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    spent = 0
    for pid in mine:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                spent += int(task.read_text().split()[0])
    return spent / 1e9


CLOCKS = {"wall": time.perf_counter, "processor": processor_s}


def ours(model: str, dtype: str, threads: int, clock: Callable[[], float]) -> Arm:
    llm = LLM(model, dtype=dtype, threads=threads, kv_cache_memory_bytes="256M", prefix_cache=False)

    def once(prompts: list[list[int]], new: int) -> float:
        started = clock()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts],
                     SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))
        return clock() - started
    return once


def llama(path: Path, threads: int, clock: Callable[[], float]) -> Arm:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.kv_unified = 4096, STREAMS, False, True
    params.cache_prompt, params.cache_idle_slots = False, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cpuparams.poll = 0               # its threads do not spin while another arm runs
    server, pool = xllamacpp.Server(params), ThreadPoolExecutor(STREAMS)

    def one(prompt: list[int], new: int) -> None:
        answer = server.handle_completions({"prompt": prompt, "n_predict": new, "temperature": 0.0,
                                            "ignore_eos": True, "cache_prompt": False})
        assert answer and answer["usage"]["completion_tokens"] == new, f"llama.cpp: {answer}"

    def once(prompts: list[list[int]], new: int) -> float:
        started = clock()
        list(pool.map(lambda prompt: one(prompt, new), prompts))
        return clock() - started
    return once


def rates(arm: Arm, new: int) -> dict[str, float]:
    """tokens/s of each work, once; of a decode without its prompts."""
    found = {}
    for n in (1, STREAMS):
        prompts = PROMPTS[:n]
        found[f"decode, {n} stream{'s' * (n > 1)}"] = n * new / (arm(prompts, 1 + new) - arm(prompts, 1))
    return found | {f"prefill, {len(p):,} tokens": len(p) / arm([p], 1) for p in (LONG, LONGEST)}


def rows(taken: dict[str, list[dict[str, float]]], base: str) -> list[tuple[str, ...]]:
    """Of each arm and work the tokens/s, and the ratio to `base` of the same round."""
    return [(work, name, str(Spread.of([t[work] for t in each])),
             str(Spread.of([t[work] / b[work] for t, b in zip(each, taken[base], strict=True)])))
            for work in taken[base][0] for name, each in taken.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--types", nargs="+", default=["Q4_1", *TYPES], choices=["Q4_1", *TYPES])
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--output-json", metavar="FILE")
    args = parser.parse_args()
    clock = CLOCKS[args.clock]
    with tempfile.TemporaryDirectory() as folder:
        demo = fetch_demo()
        files = {name: Path(folder) / f"{name}.gguf" if name in TYPES else demo for name in args.types}
        for name in files.keys() & TYPES.keys():
            remake(demo, files[name], TYPES[name])
        arms: dict[str, Arm] = {"penstock bfloat16": ours("demo", "bfloat16", args.threads, clock)}
        arms |= {f"penstock {name}": ours(str(path), "gguf", args.threads, clock)
                 for name, path in files.items() if name != "F16"}
        try:
            arms |= {f"llama.cpp {name}": llama(path, args.threads, clock) for name, path in files.items()}
        except ImportError as why:
            print(f"without llama.cpp: {why}")
        for arm in arms.values():
            rates(arm, 2)
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        loads = []
        for _ in range(args.rounds):
            for name, arm in arms.items():
                taken[name].append(rates(arm, args.new))
            loads.append(os.getloadavg()[0])
        base = next(iter(arms))
        print(table(("work", "arm", "tokens/s", f"of {base}, by round"), rows(taken, base)))
        if args.output_json:
            write_json(args.output_json, {
                "about": f"{probe().cpu}, {args.threads} threads, {args.clock} time, {args.rounds} rounds, "
                         f"{args.new} new tokens",
                "load": loads, "results": taken})


if __name__ == "__main__":
    main()
