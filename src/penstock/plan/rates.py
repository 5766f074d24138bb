"""The numbers that turn a plan into seconds, read from a JSON file that names the source of each."""
from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from penstock.config.base.errors import ConfigError

SHIPPED = Path(__file__).parent / "machines"
UNITS = {
    "step_us": "us a step", "weights_bytes_s": "bytes/s", "prompt_flops_s": "FLOP/s",
    "cached_us": "us a token", "request_us": "us a request",
    "kv_bytes_s": "bytes/s", "selecting_us": "us a request", "miss_share": "share of the selected tokens",
    "miss_bytes_s": "bytes/s", "load_bytes_s": "bytes/s", "save_bytes_s": "bytes/s", "store_read_bytes_s": "bytes/s",
    "store_write_bytes_s": "bytes/s", "store_us": "us a transfer", "memory_bytes": "bytes", "workspace_bytes": "bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speeds of one machine. A step takes `step_us`, its weights at `weights_bytes_s`, prompt tokens at
    `prompt_flops_s`, `cached_us` for each cached token of a prompt that begins, and for each request that decodes
    `request_us` and its KV at `kv_bytes_s`.

    selecting_us    more for a request that decodes from host memory
    miss_share      tokens that its hot buffer misses, at its least size, of those that it selects
    miss_bytes_s    reads of these; load_bytes_s, save_bytes_s: pages from host memory and to it
    store_us        before the first byte of a transfer from or to storage
    memory_bytes    of the GPU, `workspace_bytes` of which the largest step takes beyond weights and KV; 0: a CPU
    """

    name: str
    device: Literal["cpu", "cuda"]
    step_us: float
    weights_bytes_s: float
    prompt_flops_s: float
    cached_us: float
    request_us: float
    kv_bytes_s: float
    selecting_us: float
    miss_share: float
    miss_bytes_s: float
    load_bytes_s: float
    save_bytes_s: float
    store_read_bytes_s: float
    store_write_bytes_s: float
    store_us: float
    memory_bytes: float
    workspace_bytes: float
    estimated: tuple[str, ...] = ()         # which of them nothing has measured


MAY_BE_0 = frozenset(("step_us", "cached_us", "request_us", "selecting_us", "miss_share", "store_us", "memory_bytes",
                      "workspace_bytes"))
NUMBERS = tuple(f.name for f in fields(Rates) if f.name in UNITS)


ENDLESS = 1e300         # of a speed: it takes no time
COPIES = ("miss_bytes_s", "load_bytes_s", "save_bytes_s")


def unmeasured(device: Literal["cpu", "cuda"], **given: float) -> Rates:
    """Numbers that stand for those that nobody has measured, which are not given: copies of 10 GB/s, storage of 1 GB/s,
    all memory that is asked for."""
    values = dict.fromkeys(UNITS, ENDLESS) | dict.fromkeys(MAY_BE_0, 0.0) | dict.fromkeys(COPIES, 1e10) | {
        "store_read_bytes_s": 1e9, "store_write_bytes_s": 1e9, "memory_bytes": float(device == "cuda") * (1 << 50)}
    return Rates(name="", device=device, estimated=(), **(values | given))


def read_rates(name: str) -> Rates:
    """Read a file, or the rates of a machine that penstock has some of, by name. Raises ConfigError."""
    path, shipped = Path(name), SHIPPED / f"{name}.json"
    if not path.exists() and shipped.exists():
        path = shipped
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        known = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
        raise ConfigError(f"--rates {name}: {e}; a JSON file is needed, or one of {known}") from None
    return parse(given, f"--rates {name}")


def parse(given: Any, where: str) -> Rates:
    """Check what a file holds: `name`, `device`, and `rates`, each with `value`, `unit` and `source`; one that was
    not measured has `"estimated": true`. Raises ConfigError."""
    rates = given.get("rates") if isinstance(given, dict) else None
    if not isinstance(rates, dict) or given.get("device") not in ("cpu", "cuda"):
        raise ConfigError(f"{where}: an object with name, device (cpu or cuda) and rates is needed")
    for name in (*(n for n in NUMBERS if n not in rates), *(n for n in rates if n not in NUMBERS)):
        raise ConfigError(f"{where}: {name} is {'not known' if name in rates else 'missing'}; rates are "
                          f"{', '.join(NUMBERS)}")
    values = {name: _value(rates[name], name, where) for name in NUMBERS}
    return Rates(name=str(given.get("name", "")), device=given["device"], **values,
                 estimated=tuple(name for name in NUMBERS if rates[name].get("estimated")))


def _value(entry: Any, name: str, where: str) -> float:
    if not isinstance(entry, Mapping) or entry.get("unit") != UNITS[name] or not entry.get("source"):
        raise ConfigError(f'{where}: {name} needs value, "unit": "{UNITS[name]}" and source')
    value = entry.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0 \
            or (value == 0 and name not in MAY_BE_0):
        raise ConfigError(f"{where}: {name} is {value}: a number above 0 is needed")
    return float(value)
