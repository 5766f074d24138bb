"""Cases of own kernels against their references, to be run under a checker of memory accesses.

    compute-sanitizer --tool memcheck python bench/device/sanitize.py latent_attention select [--every 4]

Of each op every n-th case. A checker slows what kernels do, not what compiles them.
"""
from __future__ import annotations

import argparse
import time

import torch

from penstock.kernels.cases import cases_of
from penstock.kernels.registry import OPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", default=[op for op, of in OPS.items()
                                                   if "cuda" in [i.name for i in of.implementations]])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further case behind so many")
    args = parser.parse_args()
    began, wrong = time.perf_counter(), []
    for name in args.ops:
        op, ran = OPS[name], 0
        for case, here in list(zip(cases_of(op, "cuda"), cases_of(op), strict=True))[::args.every]:
            if time.perf_counter() - began < args.seconds:
                wrong.append(case.wrong(case.run(op.use("cuda")), here.run(op.use("reference"))))
                torch.cuda.synchronize()
                ran += 1
        print(f"{name}: {ran} cases, {time.perf_counter() - began:.0f} s", flush=True)
    for text in filter(None, wrong):
        print(text)
    print(f"{len(wrong)} cases, {sum(map(bool, wrong))} wrong")


if __name__ == "__main__":
    main()
