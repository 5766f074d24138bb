"""What planning a step costs: `Core.advance` with many decoding rows and an executor that takes no time.

Every row decodes one token a step; pages grow, seal and retire as they would with a model behind them.
Overlap is off: a turn is the one `advance` that retires a step and plans the next. The slowest turns
hold Python's cycle collector, which walks the requests and the tree; --no-gc turns it off.

    python bench/planning.py --rows 8 256 1024
"""
from __future__ import annotations

import argparse
import gc
import time

from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, RequestId, Retired, StepPlan
from penstock.core.settings import CoreConfig


def core_of(rows: int, context: int, page_size: int) -> Core:
    pages = rows * (-(-context // page_size) + 1)
    # One step takes all prompts whole: then all rows decode from the same step on.
    return Core(CoreConfig(page_size=page_size, rows=rows, hbm_pages=pages, max_len=context,
                           step_tokens=rows * context))


def answer(plan: StepPlan, token: int) -> Retired:
    return Retired(plan.step, ((token,),) * sum(plan.samples))


def decode_turns(rows: int, context: int, page_size: int, turns: int) -> list[float]:
    """Seconds of each turn in which all `rows` decode."""
    core = core_of(rows, context, page_size)
    prompt = context - turns - 8
    # Lengths differ, or all rows would grow and seal a page in the same turn.
    events: list[Event] = [
        Arrived(RequestId(i + 1), tuple(i * 10_000 + p for p in range(prompt - i % page_size)), turns + 8)
        for i in range(rows)]
    plan = core.advance(events).plan
    assert plan is not None and len(plan.rows) == rows
    plan = core.advance([answer(plan, 1)]).plan
    taken = []
    for token in range(turns):
        assert plan is not None and len(plan.rows) == rows
        retired = answer(plan, token)
        started = time.perf_counter()
        plan = core.advance([retired]).plan
        taken.append(time.perf_counter() - started)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 256, 1024])
    parser.add_argument("--context", type=int, default=600, help="tokens of prompt and output")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--no-gc", action="store_true", help="without Python's cycle collector")
    args = parser.parse_args()
    if args.no_gc:
        gc.disable()
    for rows in args.rows:
        taken = sorted(decode_turns(rows, args.context, args.page_size, args.turns))
        p50, p99 = (1e3 * taken[len(taken) * p // 100] for p in (50, 99))
        print(f"{rows} rows: p50 {p50:.3f} ms, p99 {p99:.3f} ms, least {1e3 * taken[0]:.3f} ms "
              f"({1e6 * taken[0] / rows:.1f} us a row)")


if __name__ == "__main__":
    main()
