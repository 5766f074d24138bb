"""Numbers to tables, JSON and a PNG. Knows percentiles and nothing of what was measured."""
from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.config.base.errors import ConfigError, install_hint


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of repeated measurements, in the unit of its row."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)} .. {_short(self.high)})"


def percentile(values: Sequence[float], p: float) -> float:
    """Linear interpolation between closest ranks; p in 0..100. NaN without values."""
    import numpy as np

    return float(np.percentile(values, p)) if values else float("nan")


def shown(x: float, form: str) -> str:
    """In this format, and "-" for a NaN: what has no value."""
    return "-" if math.isnan(x) else format(x, form)


def _short(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, columns aligned so that it also reads well in a terminal."""
    cells = [list(header), *([str(c) for c in row] for row in rows)]
    width = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, width, strict=True)) + " |"
             for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in width) + "|", *lines[1:]])


def check_output(flag: str, path: str | None) -> None:
    """Before hours of work: whether what comes of them can be written. Raises ConfigError."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as e:
        raise ConfigError(f"{flag} {path}: {e.strerror}") from None


def write_json(path: str, data: Mapping[str, Any]) -> None:
    """A number that is not finite becomes null: JSON has no other word for it."""
    Path(path).write_text(json.dumps(_finite(data), indent=1, allow_nan=False) + "\n")


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def optional(name: str) -> Any:
    """A package of the extra `bench`. Raises ConfigError that names the command to get it."""
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f"penstock needs {name.split('.')[0]} here: {install_hint('bench')}") from None


def plot_percentiles(path: str, title: str, series: Mapping[str, Sequence[float]]) -> None:
    """One cumulative curve a series, milliseconds on the x axis, as a PNG."""
    optional("matplotlib").use("Agg")
    plt = optional("matplotlib.pyplot")
    figure, axes = plt.subplots(1, len(series), figsize=(4.5 * len(series), 3.4), squeeze=False)
    for ax, (name, values) in zip(axes[0], series.items(), strict=True):
        ordered = sorted(v * 1e3 for v in values)
        share = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
        ax.step(ordered, share, where="post")
        for p in (50, 99):
            x = percentile(ordered, p)
            ax.axvline(x, linestyle="--", linewidth=0.8, color="gray")
            ax.annotate(f"p{p} {x:.0f} ms", (x, 4), rotation=90, fontsize=8)
        ax.set(title=name, xlabel="ms", ylabel="% of requests", ylim=(0, 101))
    _save(figure, path, title)


def plot_bars(path: str, title: str, unit: str, rows: Mapping[str, Mapping[str, Spread]]) -> None:
    """One group of bars a row, one bar an arm, whiskers from minimum to maximum, as a PNG."""
    optional("matplotlib").use("Agg")
    plt = optional("matplotlib.pyplot")
    arms = list(dict.fromkeys(arm for row in rows.values() for arm in row))
    figure, ax = plt.subplots(figsize=(1.6 * len(rows) + 2, 3.8))
    for k, arm in enumerate(arms):
        at = [i + 0.8 * (k - (len(arms) - 1) / 2) / len(arms)
              for i, row in enumerate(rows.values()) if arm in row]
        found = [row[arm] for row in rows.values() if arm in row]
        ax.bar(at, [s.median for s in found], 0.75 / len(arms), label=arm,
               yerr=[[s.median - s.low for s in found], [s.high - s.median for s in found]])
    ax.set(yscale="log", ylabel=unit, xticks=range(len(rows)))
    ax.set_xticklabels(list(rows), fontsize=8)
    ax.legend()
    _save(figure, path, title)


def plot_line(path: str, title: str, x: str, y: str, xs: Sequence[float], ys: Sequence[float]) -> None:
    """One line with its points, as a PNG."""
    optional("matplotlib").use("Agg")
    figure, ax = optional("matplotlib.pyplot").subplots(figsize=(5, 3.4))
    ax.plot(xs, ys, marker="o")
    ax.set(xlabel=x, ylabel=y, ylim=(0, 101))
    _save(figure, path, title)


def _save(figure: Any, path: str, title: str) -> None:
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"plot written to {path}")
