"""Programs of bench/ as modules."""
from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).parents[2] / "bench"


def program(path: str) -> ModuleType:
    """That of bench/`path`, which finds those beside it while it is imported."""
    file, name = BENCH / path, "bench_" + path.removesuffix(".py").replace("/", "_")
    sys.path.insert(0, str(file.parent))
    try:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module
