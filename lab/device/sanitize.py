"""Cases of own kernels against their references, to be run under a checker of memory accesses.

    compute-sanitizer --tool memcheck python lab/device/sanitize.py latent_attention select [--every 4]

Of each op every n-th case, in an order that is drawn. A checker slows what kernels do, not what compiles
them.
"""
from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch

from penstock.kernels.registry import OPS

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kernels"))
from cases import cases_of, takes

OURS = {op: i.name for op, of in OPS.items() for i in reversed(of.implementations)      # the first of each counts
        if i.name in ("fa4", "gluon", "cuda", "triton")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", default=list(OURS))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9,
                        help="begin no further case of an op behind so many")
    args = parser.parse_args()
    wrong = []
    for name in args.ops:
        op, ran, began = OPS[name], 0, time.perf_counter()
        cases = [pair for pair in zip(cases_of(op, "cuda"), cases_of(op), strict=True)
                 if takes(op.get(OURS[name]), pair[0])][::args.every]
        random.Random(0).shuffle(cases)
        for case, here in cases:
            if time.perf_counter() - began < args.seconds:
                wrong.append(case.wrong(case.run(op.use(OURS[name])), here.run(op.use("reference"))))
                torch.cuda.synchronize()
                ran += 1
        print(f"{name}: {ran} of {len(cases)} cases, {time.perf_counter() - began:.0f} s", flush=True)
    for text in filter(None, wrong):
        print(text)
    print(f"{len(wrong)} cases, {sum(map(bool, wrong))} wrong")


if __name__ == "__main__":
    main()
