"""W2 on lanes: decode of the Qwen3-8B shape with random weights at --tp 1 and at --tp 2, each on a GPU of
its own.

    PYTHONPATH=src:bench/device python lab/device/lanes.py OUT [--layers 36] [--batches 1,64] [--prompt 512]
"""
from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from direct import GREEDY, QWEN3_8B, Direct, spread, write

from penstock.config.base.machine import probe
from penstock.config.settings.cli import from_options
from penstock.config.settings.resolve import resolve
from penstock.core.core import Core
from penstock.exec.start.build import build_engine


class Served(Direct):
    """`Direct` of an engine as a server builds it."""

    def __init__(self, model: str, **options: object) -> None:
        given = {"load_format": "dummy", "dtype": "bfloat16", "seed": 1, "device": "cuda",
                 "prefix_cache": False, **options}
        self.built = build_engine(resolve(from_options(model, given), probe()))
        self._params, self._attention, self._selects, self._newest = GREEDY, 0, False, 0
        self.core, self.front = Core(self.built.core_config), self.built.executor

    def close(self) -> None:
        if self.built.crew is not None:
            self.built.crew.close(asked=True)


def measured(engine: Direct, count: int, prompt: int, new: int, repeats: int) -> dict[str, Any]:
    """Seconds of a decode step, the median of each run; the first run is not counted."""
    rng, steps = random.Random(count), []
    for again in range(1 + repeats):
        prompts = [[rng.randrange(10, 150000) for _ in range(prompt)] for _ in range(count)]
        ran = engine.run(prompts, new)
        if again:
            steps.append(1e3 * spread(ran.step_s[4:])["median"])
    return spread(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=96, help="tokens of each request")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    batches, rows = [int(n) for n in args.batches.split(",")], []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN3_8B | {"num_hidden_layers": args.layers}))
        for tp in (1, 2):
            engine = Served(folder, tp=tp, max_num_seqs=max(batches), step_tokens=8192, hbm_bytes="12G",
                            max_model_len=args.prompt + args.new + 16)
            info = engine.built.info
            for count in batches:
                found = measured(engine, count, args.prompt, args.new, args.repeats)
                rows.append({"tp": tp, "requests": count, "prompt": args.prompt, "decode_step_ms": found,
                             "start_s": info["start_seconds"], "weight_bytes": info["weight_bytes"]})
                print(rows[-1], flush=True)
            engine.close()
            del engine
            gc.collect()                    # the next one measures what is free
            torch.cuda.empty_cache()
    for count in batches:
        one, two = (next(r for r in rows if (r["tp"], r["requests"]) == (tp, count)) for tp in (1, 2))
        two["times_tp_1"] = one["decode_step_ms"]["median"] / two["decode_step_ms"]["median"]
        print(count, two["times_tp_1"], flush=True)
    write("lanes", args.out, rows)


if __name__ == "__main__":
    main()
