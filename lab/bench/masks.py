"""Eight streams without a grammar, and one or all of them under a JSON schema, in turns.

    PYTHONPATH=src python lab/bench/masks.py [--arms one all] [--model demo] [--rounds 12] [--tokens 24]

After each round prints, as JSON, of each arm its tokens a second of processor time of the engine, and of the
clock, over those of no grammar in the same round: the median of the rounds so far, the quarter below and
above, the least and the most. So it may be ended at any time. With one thread processor time is what is
worked: several of them wait for one another with all they have.
"""

from __future__ import annotations

import argparse
import json
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
MASKED = {"none": 0, "one": 1, "all": STREAMS}


def cpu_s() -> float:
    """Of this process's children that live: the engine, and what checks grammars."""
    ns = 0
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            ns += sum(int(t.read_text().split()[0]) for t in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return ns / 1e9


def told(speeds: dict[str, list[tuple[float, float]]]) -> dict[str, float | list[float]]:
    """Of at least two rounds."""
    found: dict[str, float | list[float]] = {
        "rounds": len(speeds["none"]),
        "tokens_per_s": round(statistics.median(clock for _, clock in speeds["none"]), 1),
    }
    for arm in list(speeds)[1:]:
        for at, name in enumerate(("processor", "clock")):
            ratios = [mine[at] / other[at] for mine, other in zip(speeds[arm], speeds["none"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, method="inclusive")
            found[f"{arm}_{name}"] = [round(x, 3) for x in (middle, low, high, min(ratios), max(ratios))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--arms", nargs="+", choices=("one", "all"), default=["one", "all"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llm = LLM(args.model, threads=args.threads)
    prompts = [f"List {n + 2} things in a kitchen, with names and numbers." for n in range(STREAMS)]
    arms = ["none", *args.arms]
    speeds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for round_ in range(args.rounds + 1):  # the first one warms up
        turn = round_ % len(arms)
        for arm in [*arms, *arms][turn : turn + len(arms)]:
            masked = MASKED[arm]
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
        if round_ > 1:
            print(json.dumps(told(speeds)), flush=True)


if __name__ == "__main__":
    main()
