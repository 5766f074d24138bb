"""Run by test_linear_isas.py in a process of its own: C kernels but `linear`, compiled for less than this
CPU has, against the references (one case of eight)."""
from __future__ import annotations

import sys

from penstock.kernels import platform
from penstock.kernels.cases import cases_of
from penstock.kernels.registry import OPS

platform.limit(sys.argv[1])
here = platform.probe()
count = 0
for op in OPS.values():
    if op.name == "linear" or not any(i.name == "native" for i in op.implementations):
        continue
    for implementation in op.implementations:
        if implementation.name == "native":
            implementation.usable_on(here)
    for case in cases_of(op)[::8]:
        wrong = case.wrong(case.run(op.use("native")), case.run(op.use("reference")))
        assert not wrong, (op.name, case.name, wrong)
        count += 1
print("checked", count)
