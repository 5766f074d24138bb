"""The engine's part of a trace: which phases a request is said to have been in, and for how long."""
from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from penstock.api import server
from penstock.config.base.errors import ConfigError
from penstock.config.request.params import SamplingParams
from penstock.config.settings.tree import Config, ModelConfig, ServerConfig
from penstock.core.lifecycle import Phase, Place, State, Trigger
from penstock.core.plan import Retired
from penstock.engine.traces.timeline import PHASES_MAX, Timelines
from penstock.engine.wire import Origin, OutputChunk, Submit, Timeline

EPOCH = 1_000_000


class Clock:
    """Steps of one nanosecond since 1970 are EPOCH ahead of the steady ones."""

    def __init__(self) -> None:
        self.now = 0
        self.of = Timelines(lambda: self.now, lambda: self.now + EPOCH)

    def at(self, now: int) -> Timelines:
        self.now = now
        self.of.look()
        return self.of

    def edge(self, now: int, r: SimpleNamespace, phase: Phase) -> None:
        source, r.phase = State(r.phase, Place.DEVICE), phase
        self.at(now).taken(r, source, Trigger.END)

    def submit(self, now: int, rid: int, trace: str = "00-1-2-01", choice: int = 0) -> SimpleNamespace:
        self.at(now).begin(Submit(rid=rid, prompt=[1], params=SamplingParams(), stop_ids=[], max_new=1, choice=choice,
                                   origin=Origin(trace=trace)))
        return SimpleNamespace(rid=rid, phase=Phase.QUEUED, started=False, num_output=0)


def test_phases_follow_each_other_and_prefill_lasts_to_the_first_token() -> None:
    clock = Clock()
    r = clock.submit(10, 1, choice=2)
    for now, phase in ((20, Phase.FETCHING), (30, Phase.LOADING), (45, Phase.PREFILL), (60, Phase.DECODE)):
        clock.edge(now, r, phase)
    clock.at(65).applied(Retired(1, ()))            # of another request
    r.num_output = 1
    clock.at(70).applied(Retired(2, ()))
    for now, phase in ((80, Phase.DECODE), (85, Phase.DECODE), (90, Phase.PAUSED), (100, Phase.LOADING),
                       (100, Phase.PREFILL), (100, Phase.DECODE), (120, Phase.DONE)):
        clock.edge(now, r, phase)
    assert clock.of.ended([], {}) == [Timeline("00-1-2-01", 2, [
        (name, EPOCH + begin, EPOCH + end) for name, begin, end in (
            ("queued", 10, 20), ("fetching", 20, 30), ("loading", 30, 45), ("prefill", 45, 70), ("decode", 70, 90),
            ("preempted", 90, 100), ("decode", 100, 120))])]
    assert clock.of.ended([], {}) == [] and not clock.of._open and not clock.of._untold


def test_what_was_fetched_in_vain_is_queued_again() -> None:
    clock = Clock()
    r = clock.submit(0, 1)
    for now, phase in ((5, Phase.FETCHING), (9, Phase.DROPPED), (12, Phase.LOADING), (12, Phase.PREFILL)):
        clock.edge(now, r, phase)
    r.started = True
    for now, phase in ((20, Phase.DROPPED), (25, Phase.PREFILL), (30, Phase.DONE)):
        clock.edge(now, r, phase)
    [timeline] = clock.of.ended([], {})
    names = [name for name, _, _ in timeline.phases]
    assert names == ["queued", "fetching", "queued", "prefill", "preempted", "prefill"]


def test_a_request_that_never_reaches_the_planner_has_waited() -> None:
    clock = Clock()
    clock.submit(0, 1)
    clock.submit(1, 2)
    clock.submit(2, 3)
    clock.at(5).aborted(2)
    ended = clock.of.ended([OutputChunk(rid=1, tokens=[], index=0, finish="refused"),
                            OutputChunk(rid=3, tokens=[4], index=0)], {3: None})
    assert [t.phases for t in ended] == [[("queued", EPOCH + 1, EPOCH + 5)], [("queued", EPOCH, EPOCH + 5)]]
    # It lives on in a prefill instance whose client has its answer.
    assert clock.of.ended([OutputChunk(rid=3, tokens=[4], index=0, finish="length")], {3: None}) == []
    assert list(clock.of._open) == [3]


def test_requests_without_a_trace_cost_nothing_and_many_phases_are_cut() -> None:
    clock = Clock()
    r = clock.submit(0, 1, trace="")
    clock.edge(3, r, Phase.PREFILL)
    assert not clock.of._open
    r = clock.submit(0, 2)
    for now in range(1, 4 * PHASES_MAX):
        clock.edge(now, r, Phase.PREFILL if now % 2 else Phase.PAUSED)
    clock.edge(1000, r, Phase.DONE)
    assert len(clock.of.ended([], {})[0].phases) == PHASES_MAX


def test_nothing_is_imported_and_nothing_watches_without_the_flag() -> None:
    program = ("import sys; import penstock.api.server as server, penstock.engine.process, penstock.llm.llm; "
               "from penstock.config.settings.tree import Config, ModelConfig; "
               "assert server._traces(Config(model=ModelConfig(model='demo'))) is None; "
               "print([name for name in sys.modules if name.startswith('opentelemetry') or name.endswith('.spans')])")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_the_flag_without_the_extra_says_what_to_install(monkeypatch, missing) -> None:
    config = Config(model=ModelConfig(model="demo"), server=ServerConfig(otlp_traces_endpoint="http://localhost:4318"))
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(ConfigError, match=rf"{missing.replace('.', '-')} is not installed: pip install '\.\[otel\]'"):
        server._traces(config)
