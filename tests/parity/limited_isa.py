"""Run by test_linear_isas.py in a process of its own: C kernels but `linear`, compiled for less than this
CPU has, against the references (one case of eight)."""
from __future__ import annotations

import sys
from pathlib import Path

from penstock.kernels import platform
from penstock.kernels.registry import OPS

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from cases import cases_of

platform.limit(sys.argv[1])
here = platform.probe()
count = 0
for op in OPS.values():
    if op.name == "linear" or not any(i.name == "c" for i in op.implementations):
        continue
    for implementation in op.implementations:
        if implementation.name == "c":
            implementation.usable_on(here)
    for case in cases_of(op)[::8]:
        wrong = case.wrong(case.run(op.use("c")), case.run(op.use("reference")))
        assert not wrong, (op.name, case.name, wrong)
        count += 1
print("checked", count)
