"""Eight streams of the demo without a grammar, all under a JSON schema, and one of them under it, in turns.

    PYTHONPATH=src python bench/masks.py [--rounds 5] [--tokens 96]

Prints, as JSON, medians and ranges of the arms' tokens a second of processor time of the engine, and of the
clock, over that of no grammar in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from penstock import LLM, SamplingParams
from penstock.config.request.grammar import Grammar

STREAMS = 8
# No answer ends early.
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "array",
            "minItems": 500,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "kind", "count"],
                "properties": {
                    "name": {"type": "string"},
                    "kind": {"enum": ["a", "b", "cc"]},
                    "count": {"type": "integer"},
                },
            },
        }
    ),
)
ARMS = {"none": 0, "one": 1, "all": STREAMS}


def cpu_s() -> float:
    """Of this process's children that live: the engine."""
    total = 0.0
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    llm = LLM("demo")
    prompts = [f"List {n + 2} things in a kitchen, with names and numbers." for n in range(STREAMS)]
    speeds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for round_ in range(args.rounds + 1):  # the first one warms up
        for arm, masked in ARMS.items():
            params = [
                SamplingParams(
                    max_tokens=args.tokens,
                    seed=n,
                    ignore_eos=n >= masked,
                    grammar=SCHEMA if n < masked else None,
                )
                for n in range(STREAMS)
            ]
            began, used = time.perf_counter(), cpu_s()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            took, used = time.perf_counter() - began, cpu_s() - used
            made = sum(len(o.outputs[0].token_ids) for o in outputs)
            assert made == STREAMS * args.tokens, made
            if round_:
                speeds[arm].append((made / used, made / took))
    told = {"tokens_per_s": round(statistics.median(clock for _, clock in speeds["none"]), 1)}
    for arm in ("one", "all"):
        for at, name in enumerate(("processor", "clock")):
            ratios = [mine[at] / other[at] for mine, other in zip(speeds[arm], speeds["none"], strict=True)]
            told[f"{arm}_{name}"] = [
                round(x, 3) for x in (statistics.median(ratios), min(ratios), max(ratios))
            ]
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
