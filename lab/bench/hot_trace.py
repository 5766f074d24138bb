"""Share of selected units that a hot buffer of a given size has already, from recorded selections.

A trace is what one request chose, step by step, layer by layer, while it decoded from host pages. It is
played through `resolve`, which gives up what was used longest ago, once for each size; no model is needed.

    python lab/bench/hot_trace.py record tests/data/recall lab/bench/traces/recall.npz --context 4000
    python lab/bench/hot_trace.py record demo lab/bench/traces/demo.npz --context 4000 --sparse-top-k 512
    python lab/bench/hot_trace.py play lab/bench/traces/*.npz

    S steps   L layers   K KV heads   C chosen units
"""
from __future__ import annotations

import argparse
import functools
import json
import pydoc_data.topics
from pathlib import Path

import numpy as np
import torch
from penstock.serve.engine.loop import EngineLoop
from penstock.serve.text.tokenizer import open_tokenizer
from penstock.serve.wire import Submit

from penstock.bench.report import table
from penstock.config.base.machine import probe
from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import attention_identity
from penstock.config.settings.cli import from_options
from penstock.config.settings.resolve import resolve
from penstock.core.core import Core
from penstock.eval import tasks
from penstock.eval.tasks import Size
from penstock.exec.start.build import build_engine
from penstock.kernels import registry
from penstock.kernels.choose import resolve as op
from penstock.kernels.platform import probe as kernels_probe
from penstock.memory.hot import HotBuffers
from penstock.model.weights.locate import locate

TIMES = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)         # hot buffers, times the budget; each and one page


def conversation(encode, context: int, new: int) -> tuple[list[int], tuple[int, ...]]:
    """A prompt and what is said behind it: questions in the recall model's words, else Python's help."""
    if len(encode("k1 v1 f1 recall |")) == 5:
        [held] = tasks.interviews("tracking", Size(contexts=(context,), samples=1, questions=new // 4, seed=2,
                                                   tokens_of=lambda text: len(text.split())))
        return encode(held.context), tuple(encode(held.dialogue)[:new])
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    ids = encode(text[:(context + new) * 8])
    return ids[:context], tuple(ids[context:context + new])


def record(args: argparse.Namespace) -> None:
    options = {"sparse_kv": "always", "dtype": "float32", "dram_bytes": "2GiB", "hbm_bytes": "256MiB",
               "page_size": 16, "max_num_seqs": 1, "overlap": False, "seed": 1}
    if args.sparse_top_k:
        options["sparse_top_k"] = args.sparse_top_k
    config = resolve(from_options(args.model, options), probe())
    built = build_engine(config)
    tokenizer, selection = open_tokenizer(locate(args.model)), built.selection
    assert tokenizer is not None and selection is not None
    encode = functools.partial(tokenizer.encode, add_special=False)
    prompt, said = conversation(encode, args.context, args.steps + 1)
    chosen: list[np.ndarray] = []
    layers = built.executor._ranks[0]._attending._layers        # there is no public way to look at choices
    right = layers.attend

    def attend(layer, q_BNH, chosen_BKC, step, sinks_N=None):
        if len(q_BNH) == 1 and int(step.position_B) >= len(prompt):
            chosen.append(chosen_BKC[0].numpy().astype(np.int16))
        return right(layer, q_BNH, chosen_BKC, step, sinks_N)
    layers.attend = attend
    loop = EngineLoop(Core(built.core_config), built.executor, vocab_size=built.vocab_size,
                      max_model_len=built.max_model_len, selection=selection)
    loop.handle(Submit(
        rid=1, prompt=prompt, stop_ids=[], max_new=len(said), selects=True,
        attention=attention_identity(selection), params=SamplingParams(
            temperature=0.0, forced=said, max_tokens=len(said), top_k_tokens=selection.budget)))
    chunks = loop.turn(block=False)
    while not loop.idle:
        chunks += loop.turn(block=True)
    num_layers = int(built.info["num_layers"] or 0)
    meta = {"model": str(args.model), "context": len(prompt), "budget": selection.budget,
            "unit": selection.unit, "page_size": 16, "reads": chunks[-1].kv_reads}
    steps_SLKC = np.stack(chosen).reshape(-1, num_layers, *chosen[0].shape)
    np.savez_compressed(args.file, chosen=steps_SLKC, meta=np.array(json.dumps(meta)))
    print(f"{args.file}: {len(steps_SLKC)} steps, {Path(args.file).stat().st_size / 2**20:.2f} MiB, {meta}")


def play(file: str, times: tuple[float, ...] = TIMES) -> list[tuple[int, float, float, int]]:
    """Of each size: tokens of the hot buffer, share of hits, misses a step, layer and head, evictions. The
    first step fills the buffer and does not count."""
    with np.load(file, allow_pickle=False) as trace:
        chosen_SLKC = torch.from_numpy(trace["chosen"].astype(np.int32))
        meta = json.loads(str(trace["meta"]))
    num_steps, layers, heads, _ = chosen_SLKC.shape
    page, unit = meta["page_size"], meta["unit"]
    pages = -(-(meta["context"] + num_steps + 1) // page)
    run = op.OP.use(registry.choose(kernels_probe(), ops=("resolve",))["resolve"].name)
    host_RP, row_B = torch.arange(pages, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int32)
    found = []
    for hot_tokens in [int(t * meta["budget"]) + page for t in times]:
        hot_pages = -(-hot_tokens // page)
        hot = HotBuffers(layers=layers, rows=1, kv_heads=heads, pages=pages, hot_pages=hot_pages,
                         page_units=page // unit)
        hot.bind(0, list(range(hot_pages)), [-1] * hot_pages)
        for step, chosen_LKC in enumerate(chosen_SLKC):
            [now_1] = hot.tick(1)
            for layer, chosen_KC in enumerate(chosen_LKC):
                run(chosen_KC[None], row_B, torch.full_like(host_RP, -1), host_RP, hot.layers[layer], now_1,
                    page_units=page // unit)
            if step == 0:
                hot.count_LRKE[:, 0] = 0
        _, hits, misses, evictions = hot.count_LRKE[:, 0].sum((0, 1)).tolist()
        found.append((hot_pages * page, hits / (hits + misses), misses / ((num_steps - 1) * layers * heads),
                      evictions))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    one = commands.add_parser("record")
    one.add_argument("model")
    one.add_argument("file")
    one.add_argument("--context", type=int, default=4000)
    one.add_argument("--steps", type=int, default=96)
    one.add_argument("--sparse-top-k", type=int)
    commands.add_parser("play").add_argument("files", nargs="+")
    args = parser.parse_args()
    if args.command == "record":
        record(args)
        return
    for file in args.files:
        print(f"\n{file}\n")
        print(table(("hot buffer, tokens", "hits", "misses a step, layer and head"),
                    [(size, f"{100 * hits:.1f} %", f"{misses:.1f}") for size, hits, misses, _ in play(file)]))


if __name__ == "__main__":
    main()
