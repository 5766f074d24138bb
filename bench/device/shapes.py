"""Decode and prompts of models with experts, windows, states and blocks, with random weights made on the device.

    PYTHONPATH=src python bench/device/shapes.py OUT --shape minimax-m3 [--cells hosted:1,8 resident:1,8]
    PYTHONPATH=src python bench/device/shapes.py OUT --shape gpt-oss-20b [--weights mxfp4]
    PYTHONPATH=src python bench/device/shapes.py OUT --shape qwen3-8b [--weights fp8 --backends linear=fp8]
    PYTHONPATH=src python bench/device/shapes.py OUT --shape qwen3.5-35b-a3b [--backends scan=triton]
    PYTHONPATH=src python bench/device/shapes.py OUT --shape gemma-4-31b
    PYTHONPATH=src python bench/device/shapes.py OUT --shape kimi-k2 [--kv-cache-dtype fp8_e4m3] [--heads 8]
    PYTHONPATH=src python bench/device/shapes.py OUT --shape NAME --tiny      # the same on a CPU, in seconds

Published shapes, some with fewer layers. A cell has all KV on the device, or, hosted, in host memory but for hot
buffers of four selections. Prompts run one by one and stay in the prefix cache, so that rows begin to decode together;
their tokens are drawn at temperature 1. A step's bound is the larger of its bytes of memory (weights, of experts those
that its tokens visit as tokens of a prompt do, and what it reads of KV and states) and of the link. OUT gets
shapes-NAME.json, written anew after each row.
"""
from __future__ import annotations

import argparse
import functools
import math
import random
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from configs import EMBED, EXPERTS, PACKED, SHAPES, Shape, build_model, form_of
from direct import LINK_BYTES_S, Direct, hbm_bytes_s, kernels_of, show_kernels, spread, write
from hosted import counts
from torch import Tensor

from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import indexer_selection
from penstock.config.settings.cli import from_options
from penstock.exec.load.backends import backends_of
from penstock.exec.load.layout import Caches, caches_of
from penstock.exec.load.sizing import HOT_BUDGETS, groups_of
from penstock.kernels.registry import Choice
from penstock.model import registry as families
from penstock.model.moe import SparseMLP

SPREAD, PROFILED = 2, 8         # tokens more of each row, that the last comes before the first ends; steps
FIRST, OWN = 16, 8              # steps that are not counted; tokens of a prompt that each row computes itself
DRAWN = SamplingParams(temperature=1.0, max_tokens=None)


class Visits:
    """Which experts tokens of a prompt's chunk visit, layer by layer, while `on`."""

    def __init__(self, model: Any) -> None:
        self.on, self._chosen, self._experts = False, list[Tensor](), model.spec.moe and model.spec.moe.num_experts
        for mlp in (found.mlp for found in model._layers if isinstance(found.mlp, SparseMLP)):
            mlp.route = functools.partial(self._route, mlp.route)

    def _route(self, route: Any, *given: Any) -> Any:
        found = route(*given)
        if self.on:
            self._chosen.append(found[0])
        return found

    def share(self, rows: int) -> float:
        """Of a layer's experts that so many tokens visit; 0 without experts."""
        found = [chosen[at:at + rows].unique().numel() / self._experts for chosen in self._chosen[-64:]
                 for at in range(0, len(chosen) - rows + 1, max(rows, len(chosen) // 4))]
        return mean(found) if found else 0.0


def weights_read(model: Any, config: dict[str, Any], visited: float, weights: str) -> float:
    """Bytes of weights that a step reads, of which experts it visits this share."""
    total = of_experts = unread = 0.0
    for name, size in families.tensor_shapes(config):
        packed = form_of(name, size, weights)
        nbytes = math.prod(size) * model.dtype.itemsize if packed is None else packed[0].num_bytes(size)
        total += nbytes
        of_experts += nbytes if EXPERTS in name else 0
        unread += nbytes if name == EMBED and not config["tie_word_embeddings"] else 0
    return float((total - unread - of_experts * (1 - visited)) * model.num_bytes / total)


def kv_read(model: Any, caches: Caches, context: float) -> float:
    """Bytes of KV that a row reads in a step; of states they are read and written."""
    total = 0.0
    for group, layout in zip(caches.groups, caches.layouts, strict=True):
        tokens = min(group.window or context, context)
        if model.selector is not None and group.hosted:
            tokens = min(model.selector.tokens, context)
        total += 2 * layout.page_bytes if group.snapshot else tokens * layout.page_bytes / layout.page_size
    return total


def device_tokens(caches: Caches, rows: int, tokens: int, hot: int, step_tokens: int) -> int:
    """Of a device pool with room for so many rows, hot: tokens of hosted ones there; as `Direct` counts them."""
    size, slabs = caches.page_size, 16
    for g, group in enumerate(caches.groups):
        many = -(-(rows * hot + 65536) // size) if hot and group.hosted else 0
        slabs += (-(-many // caches.slabs.slab_pages[g]) if many else
                  rows * (caches.slabs_for(-(-tokens // size), g) + 2 * group.snapshot))
        slabs += -(-2 * step_tokens // size // caches.slabs.slab_pages[g]) if group.window else 0
    return int(1.05 * slabs) * caches.slabs.slab_pages[0] * size


def captured(engine: Direct) -> dict[str, float]:
    """Steps so far that were launched kernel by kernel and could have been captured, by cause."""
    return {name: value for name, value in engine.rank.stats().items() if name.startswith("executor_launched_total")}


def measure(args: argparse.Namespace, shape: Shape, config: dict[str, Any], model: Any, visits: Visits,
            chosen: dict[str, Choice], cell: str, out: list[dict[str, Any]]) -> None:
    kind, _, told = cell.partition(":")
    batches, on_gpu, own = tuple(map(int, told.split(","))), args.device == "cuda", model.selector
    assert kind == "resident" or own is not None, "a model that selects by itself"
    rows, hot = batches[-1], HOT_BUDGETS * own.tokens if kind == "hosted" else 0
    # What a hit at the end of the context needs, and no more, stays of windows and states.
    kv = from_options("NAME", {"device": args.device, "kv_cache_dtype": args.kv_cache_dtype, **{
        name: args.tokens for name, there in (("window_interval", any(group.window for group in model.groups)),
                                              ("state_interval", model.spec.states is not None)) if there}}).kv
    size = kv.page_tokens(own.block if own else 1)
    selection = indexer_selection(own.tokens, own.block) if own else None
    caches = caches_of(groups_of(model, selection, kv), size, model.dtype)
    # Rows that decode, and prompts that are timed: how many, of how many tokens at most.
    room = ((rows + 2, args.tokens + args.steps + SPREAD * rows + 128), (len(args.prompts) + 1, max(args.prompts) + 64))
    max_len = max(longest for _, longest in room)
    host = sum(count * caches.slabs_for(-(-longest // size) + 1, g) for count, longest in room
               for g in range(len(caches.groups)))
    engine = Direct(
        model, rows=rows, max_len=max_len, buckets=batches, hot_tokens=hot, hosted=bool(hot), page_size=size,
        hbm_tokens=sum(device_tokens(caches, *given, hot, args.step_tokens) for given in room),
        step_tokens=args.step_tokens,
        dram_tokens=int(1.1 * host) * caches.slabs.slab_pages[0] * size if hot else 0, prefix_cache=True, kv=kv,
        backends=chosen, device=args.device)
    rng = random.Random(0)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(10, config["vocab_size"] - 10) for _ in range(tokens)]

    def first_s(tokens: list[int]) -> float:
        return engine.run([tokens], 1).first_s.popitem()[1]
    first_s(prompt(600))
    visits.on = True
    took = [(n, first_s(prompt(n))) for n in (args.prompts[0], *args.prompts)]
    visits.on = False
    timed = [(n, s) for n, s in took[1:]]       # the first compiles
    distinct = max(1, min(rows, int(args.prompt_seconds * timed[-1][0] / timed[-1][1] / args.tokens)))
    began, prompts = time.perf_counter(), [prompt(args.tokens + OWN) for _ in range(distinct)]
    firsts = [first_s(one) for one in prompts]
    prompts = [prompts[i % distinct] for i in range(rows)]
    print(f"{args.shape} {kind}: prompts of {timed[0][0]} at {timed[0][0] / median(s for _, s in timed):.0f} tokens/s, "
          f"{distinct} of {args.tokens} in {time.perf_counter() - began:.1f} s", flush=True)
    for batch in batches:
        at, launched, began = list[dict[str, int]](), captured(engine), time.perf_counter()
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if on_gpu else None
        seen, late = 0, args.steps - 16

        def every_step() -> None:
            nonlocal seen
            seen += 1
            if seen in (FIRST, late - 2):  # noqa: B023
                at.append(counts(engine))  # noqa: B023
            if profiler is not None and seen in (late, late + PROFILED):  # noqa: B023
                torch.cuda.synchronize()
                (profiler.start if seen == late else profiler.stop)()  # noqa: B023
        ran = engine.run(prompts[:batch], args.steps + SPREAD * batch, every_step=every_step, params=DRAWN)
        kernels = kernels_of(profiler, PROFILED) if profiler is not None and seen >= late + PROFILED else {}
        units = {key: at[1][key] - at[0].get(key, 0) for key in at[-1]} if len(at) == 2 else {}
        looked = units.get("hot_hits_total", 0) + units.get("hot_misses_total", 0)
        missed = units.get("hot_misses_total", 0) / looked if looked else 0.0
        step = spread([1e3 * s for s in ran.step_s[FIRST + 2:late - 4]] or [1e3 * s for s in ran.step_s] or [math.nan])
        context, visited = args.tokens + args.steps / 2, visits.share(batch)
        offloaded = sum(layout.page_bytes / layout.page_size for group, layout in zip(
            caches.groups, caches.layouts, strict=True) if group.hosted) if hot else 0.0
        missed_bytes = offloaded * (own.tokens if own else 0) * missed
        memory = (weights_read(model, config, visited, args.weights) + batch * kv_read(model, caches, context)
                  ) / (hbm_bytes_s() if on_gpu else 1e10)
        link = batch * missed_bytes / LINK_BYTES_S
        out.append({
            "shape": args.shape, "layers": config["num_hidden_layers"], "cell": kind, "batch": batch,
            "context": args.tokens, "distinct_prompts": distinct, "weights": args.weights, "page_size": size,
            "kv_cache_dtype": args.kv_cache_dtype, "heads": config["num_attention_heads"],
            "cached": [one.hbm_tokens + one.dram_tokens for one in ran.started.values()],
            "backends": {op: choice.name for op, choice in chosen.items()}, "weights_bytes": model.num_bytes,
            "step_ms": step, "steps": late - FIRST - 6, "tokens_s": 1e3 * batch / step["median"],
            "uncaptured": engine.rank.uncaptured, "launched": {
                name: value - launched.get(name, 0) for name, value in captured(engine).items()},
            "experts_visited": visited, "hot_tokens": hot, "hit_rate": 1 - missed if looked else None, "units": units,
            "missed_bytes_a_token": missed_bytes, "kv_read_bytes_a_token": kv_read(model, caches, context),
            "bound_memory_ms": 1e3 * memory, "bound_link_ms": 1e3 * link,
            "share_of_bound": 1e3 * max(memory, link) / step["median"],
            "prompts": timed, "prompt_tokens_s": timed[0][0] / median(s for _, s in timed), "firsts_s": firsts,
            "kernels": kernels, "capture_s": engine.capture_s, "wall_s": time.perf_counter() - began})
        write(f"shapes-{args.shape}{f'-{args.weights}' * (args.weights in PACKED)}", args.out, out, shown=False)
        row = out[-1]
        print(f"{args.shape} {kind} {batch}: step {step['median']:.3f} ms ({step['least']:.3f} to "
              f"{step['largest']:.3f}), {row['tokens_s']:.0f} tokens/s, bound {1e3 * memory:.3f} and {1e3 * link:.3f} "
              f"ms, share {row['share_of_bound']:.2f}, experts {visited:.2f}, hits {row['hit_rate']}, missed "
              f"{missed_bytes / 1e6:.2f} MB a token, not captured: {row['uncaptured'] or 'none'} {row['launched']}, "
              f"cached {min(row['cached'])}, wall {row['wall_s']:.1f} s, capture {engine.capture_s:.1f} s", flush=True)
        show_kernels(kernels, args.kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", required=True, choices=list(SHAPES))
    parser.add_argument("--cells", nargs="+", metavar="PLACE:ROWS,...", help="resident:1,32 or hosted:1,8")
    parser.add_argument("--layers", type=int, help="the first ones only")
    parser.add_argument("--heads", type=int, help="of MLA: those of one TP rank")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tokens", type=int, help="of context")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--prompt-seconds", type=float, default=20.0, help="of a cell: then rows share prompts")
    parser.add_argument("--backends", default="", help="as the engine's flag: scan=triton")
    parser.add_argument("--weights", default="bfloat16", choices=["bfloat16", *PACKED], help="what stays packed")
    parser.add_argument("--kernels", type=int, default=12, help="that are printed")
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    config, args.device, dtype = dict(shape.config), "cuda", torch.bfloat16
    args.tokens, args.prompts = args.tokens or shape.context, shape.prompts
    if args.tiny:
        config, args.device, dtype = config | shape.tiny, "cpu", torch.float32
        args.prompts, args.tokens = tuple(1024 * n // args.tokens for n in args.prompts), 1024
        args.step_tokens, args.steps = 256, 48
    if args.heads:
        config |= {"num_attention_heads": args.heads, "num_key_value_heads": args.heads}
    if args.layers:
        config |= {"num_hidden_layers": args.layers} | {
            name: config[name][:args.layers] for name in ("layer_types", "mlp_layer_types") if name in config}
    began = time.perf_counter()
    chosen = backends_of(from_options("NAME", {
        "device": args.device, **({"backends": args.backends} if args.backends else {})}), config, print)
    model = build_model(shape, config, chosen, args.device, dtype, args.weights)
    print(f"{args.shape}: {model.num_bytes / 1e9:.1f} GB in {time.perf_counter() - began:.1f} s", flush=True)
    visits, rows = Visits(model), list[dict[str, Any]]()
    for cell in args.cells or shape.cells:
        measure(args, shape, config, model, visits, chosen, cell, rows)
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
