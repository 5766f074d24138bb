"""`penstock bench rates` finds the rates of a machine from what requests take."""
from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.bench.rates import Answer, Measured
from penstock.core.settings import CacheGroup, CoreConfig
from penstock.plan.rates import ENDLESS, Rates, unmeasured
from penstock.plan.shape import Planned, Shape
from penstock.plan.trace import Session, Span, Trace, Turn
from penstock.plan.world import World

PLANNED = Planned(
    core=CoreConfig(page_size=16, rows=8, hbm_pages=4_000, max_len=8_192,
                    groups=(CacheGroup(name="full", page_bytes=16 * 4_096),)),
    shape=Shape(dense_bytes=1e7, expert_bytes=0, visited=0, token_flops=6e6, attention=((4_096.0, 0),)),
    vocab=1_000, context=8_192, weight_bytes=0, device_bytes=0, host_bytes=0)
MACHINE = unmeasured("cpu", load_bytes_s=ENDLESS, save_bytes_s=ENDLESS, weights_bytes_s=2e10, request_us=50.0,
                  kv_bytes_s=1.2e10, prompt_flops_s=1e11, cached_us=4.0)


class Virtual(Measured):
    """Its requests take what a plan of them takes. `noise`: of every other measurement, as a share."""

    def __init__(self, rates: Rates, noise: float) -> None:
        super().__init__(None, PLANNED, 3)           # type: ignore[arg-type]  # no engine is asked
        self._rates, self._noise, self._count = rates, noise, 0
        self._last: Sequence[int] = ()

    async def ask(self, prompts: Sequence[Sequence[int]], new: int) -> list[Answer]:
        cached = len(self._last) if prompts[0][:len(self._last)] == self._last else 0
        self._last = prompts[0]
        self._count += 1
        times = 1 + self._noise * (self._count % 2)
        if cached:
            spans = Span("cached", cached), Span("new", len(prompts[0]) - cached)
            sessions = [Session(0.0, (Turn(spans[:1], 1), Turn(spans, 1)))]
        else:
            sessions = [Session(0.0, (Turn((Span(f"{n}", len(prompt)),), new),)) for n, prompt in enumerate(prompts)]
        r = World(Trace("", tuple(sessions)), PLANNED, self._rates).run()
        return [Answer(times * r.ttft_s[-1], [times * gap for gap in r.gaps_s])]


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.01), (0.05, 0.2)])
def test_the_rates_of_a_machine_come_out_of_what_its_requests_take(noise: float, within: float) -> None:
    found = asyncio.run(Virtual(MACHINE, noise).steps(4_000))
    assert found == {name: pytest.approx(getattr(MACHINE, name), rel=within) for name in (
        "weights_bytes_s", "request_us", "kv_bytes_s", "prompt_flops_s", "cached_us")}


def test_what_takes_no_time_gets_no_rate() -> None:
    found = asyncio.run(Virtual(replace(MACHINE, kv_bytes_s=ENDLESS, request_us=0.0), 0.0).steps(4_000))
    assert found.get("kv_bytes_s", ENDLESS) > 1e14 and found["request_us"] == pytest.approx(0, abs=0.1)
