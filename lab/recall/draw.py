"""Draws what `train.py` logged: losses and accuracies over the time of the run.

python lab/recall/draw.py log.json out.png
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STAGES = {"dense": "dense", "warm": "indexer alone", "joint": "both, chosen tokens only"}


def runs_end_to_end(log: list[dict]) -> list[dict]:
    """Entries of all runs that were resumed, on one clock."""
    shift, last, out = 0.0, 0.0, []
    for entry in log:
        if "resumed" in entry:
            shift = last
        last = shift + entry["t"]
        out.append({**entry, "t": last})
    return out


def main(source: str, target: str) -> None:
    log = [
        e
        for e in runs_end_to_end(json.loads(Path(source).read_text())["log"])
        if "stage" in e and "loss" in e
    ]
    figure, (loss, right) = plt.subplots(2, 1, figsize=(8, 6), sharex=True)
    t = [e["t"] for e in log]
    loss.plot(t, [e["loss"] for e in log], linewidth=1, label="cross-entropy of answers")
    indexed = [e for e in log if e["stage"] != "dense"]
    loss.plot(
        [e["t"] for e in indexed],
        [e["kl"] for e in indexed],
        linewidth=1,
        label="KL of the indexers, 4 layers",
    )
    loss.set_yscale("symlog", linthresh=0.1)
    loss.set_ylabel("nats")
    for name in ("recall", "chain", "copy"):
        label = "two hops" if name == "chain" else name
        right.plot(t, [e[name] for e in log], linewidth=1, label=label)
    right.set_ylabel("share right, at the length of the moment")
    right.set_xlabel("seconds, one H200")
    for axes in (loss, right):
        axes.legend(loc="center left", fontsize=8)
        before = None
        for entry in log:
            mark = (entry["stage"], entry["tokens"])
            if mark != before:
                axes.axvline(entry["t"], color="gray", linewidth=0.5, linestyle="--")
                if axes is right:
                    text = f"{entry['tokens']}" if before and before[0] == mark[0] else STAGES[mark[0]]
                    axes.text(entry["t"], 0.5, text, rotation=90, fontsize=6, color="gray", va="center")
                before = mark
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:3])
