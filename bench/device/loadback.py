"""W3: a prompt of 32k tokens whose KV only the host has, against computing it again.

    PYTHONPATH=src python bench/device/loadback.py OUT
"""
from __future__ import annotations

import argparse
import random
from pathlib import Path

from direct import QWEN3_8B, Direct, build_model, spread, write

from penstock.core.plan import Flushed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    engine = Direct(build_model(QWEN3_8B | {"num_hidden_layers": args.layers}), rows=2,
                    max_len=args.tokens + 256, hbm_tokens=args.tokens + 512,
                    dram_tokens=3 * args.tokens, prefix_cache=True, buckets=(1,))
    rng = random.Random(0)
    def prompt() -> list[int]:
        return [rng.randrange(10, 150000) for _ in range(args.tokens)]
    engine.run([prompt()], 4)
    computed, loaded, found = [], [], []
    for _ in range(args.repeats):
        first, other = prompt(), prompt()
        computed.append(engine.run([first], 4).first_s.popitem()[1])
        near = engine.run([first], 4)               # its pages are still on the device
        engine.run([other], 4)                      # and take their place here
        far = engine.run([first], 4)
        loaded.append(far.first_s.popitem()[1])
        found.append([(s.hbm_tokens, s.dram_tokens) for r in (near, far) for s in r.started.values()])
        # The last page is computed in both, after the same KV: a byte that went astray would show.
        assert list(near.tokens.values()) == list(far.tokens.values()), "loaded KV gives other tokens"
        engine.core.advance([Flushed()])
    ratio = [a / b for a, b in zip(computed, loaded, strict=True)]
    gib = args.tokens * args.layers * 4096 / 2**30
    write("loadback", args.out, [{
        "tokens": args.tokens, "gib": gib, "computed_s": spread(computed), "loaded_s": spread(loaded),
        "computed_over_loaded": spread(ratio), "hits_hbm_dram_near_far": found,
        "load_gb_s": gib * 1.0737 / spread(loaded)["median"], "pinning_s": engine.pools_s}])


if __name__ == "__main__":
    main()
