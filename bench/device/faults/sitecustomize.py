"""Puts one of the simulator's seeded bugs into every engine that starts with this folder on PYTHONPATH.

FAULT is its name, such as hot-buffer-skipped-on-resume; the list is in tests/sim/mutants.
"""
from __future__ import annotations

import os
import sys
from pathlib import Path

if (fault := os.environ.get("FAULT")) and "penstock.engine.process" in sys.orig_argv:
    sys.path.append(str(Path(__file__).parents[3] / "tests" / "sim"))
    from mutants import MUTANTS

    import penstock.core.core as core

    core.Core = MUTANTS[fault]          # type: ignore[misc, assignment]  # before the engine's modules import it
