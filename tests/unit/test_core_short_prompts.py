"""A short prompt behind a long one gets a share of each step: ADR 0082."""
from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from penstock.core import schedule
from penstock.core.core import Core
from penstock.core.plan import Arrived, Event, RequestId, Retired, StepPlan
from penstock.core.settings import CacheGroup, CoreConfig

LONG = RequestId(1)


class Engine:
    """A core whose steps retire in the next turn. Prompts share no token."""

    def __init__(self, **settings: object) -> None:
        base: dict[str, object] = dict(page_size=16, rows=64, hbm_pages=80_000, step_tokens=64,
                                       max_len=1 << 21)
        self.core = Core(CoreConfig(**(base | settings)))  # type: ignore[arg-type]
        self.events: list[Event] = []

    def arrive(self, rid: int, tokens: int, new: int = 2, **more: object) -> None:
        self.events.append(Arrived(RequestId(rid), tuple(range(rid << 24, (rid << 24) + tokens)), new,
                                   **more))  # type: ignore[arg-type]

    def steps(self) -> Iterator[StepPlan]:
        while True:
            plan = self.core.advance(self.events).plan
            if plan is None and not self.core.live:
                return
            assert plan is not None
            self.events = [Retired(plan.step, ((9,),) * sum(plan.samples))]
            yield plan


def counts(plan: StepPlan) -> dict[int, int]:
    return dict(zip(plan.rids, plan.count, strict=True))


@pytest.mark.parametrize("step_tokens, last_tokens", [(128, 0), (200, 0), (130, 8)])
def test_chunks_end_at_multiples_but_the_last_of_a_prompt(step_tokens: int, last_tokens: int) -> None:
    """What others leave of a step is less than a multiple at times: prompts wait then."""
    engine = Engine(step_tokens=step_tokens, chunk_multiple=64, last_tokens=last_tokens)
    prompts = {1: 500, 2: 64, 3: 63, 4: 129, 5: 1000}
    for rid, tokens in prompts.items():
        engine.arrive(rid, tokens)
    done = dict.fromkeys(prompts, 0)
    for plan in engine.steps():
        for rid, start, count in zip(plan.rids, plan.start, plan.count, strict=True):
            if start < prompts[rid]:
                done[rid] += count
                assert start + count == done[rid] and (done[rid] % 64 == 0 or done[rid] == prompts[rid])
    assert done == prompts


@pytest.mark.parametrize("step_tokens, decoding, tokens, settings", [
    (32, 1, 200, {}), (63, 2, 64, {}), (64, 1, 200, {"overlap": True}), (100, 20, 200, {"draft_tokens": 3}),
    (100, 40, 200, {"pp_size": 2, "pp_together": 40}), (64, 20, 64, {"pp_size": 2, "overlap": True})])
def test_a_step_without_room_to_a_multiple_has_some_of_the_oldest_prompt(
        step_tokens: int, decoding: int, tokens: int, settings: dict[str, object]) -> None:
    """Those that decode do so for longer than anybody waits."""
    engine, prompt = Engine(step_tokens=step_tokens, chunk_multiple=64, hbm_pages=4_000, **settings), 1000
    for rid in range(decoding):
        engine.arrive(1 + rid, 5, new=10_000)
    computed, flying, steps = 0, list[StepPlan](), 0
    for _ in range(10 * tokens):
        plan = engine.core.advance(engine.events).plan
        engine.core.check()
        engine.events = []
        if plan is not None:
            flying.append(plan)
            computed += counts(plan).get(RequestId(prompt), 0)
            steps += len(plan.rids) > 0
            if steps == decoding + 2:
                engine.arrive(prompt, tokens)
        if computed == tokens:
            return
        if flying and (plan is None or len(flying) == engine.core.cfg.depth):
            done = flying.pop(0)
            engine.events += [Retired(done.step, ((9,),) * sum(done.samples))]
    raise AssertionError(f"{computed} computed after {steps} steps")


@pytest.mark.parametrize("step_tokens, short", [(64, 30), (64, 100), (100, 64), (170, 100), (255, 64), (256, 100)])
def test_neither_long_nor_short_prompts_wait_for_multiples_for_ever(step_tokens: int, short: int) -> None:
    """Behind a long one, short ones keep coming: all have their turns as they do where chunks end anywhere."""
    def played(multiple: int) -> tuple[int, int]:
        """Steps of the long prompt, and the most that a short one waited for its last chunk."""
        engine = Engine(step_tokens=step_tokens, chunk_multiple=multiple, hbm_pages=8_000)
        since, most = dict[int, int](), 0
        engine.arrive(LONG, 60 * step_tokens + 8_000)
        for n, plan in enumerate(engine.steps(), 1):
            done = [rid for rid, samples in zip(plan.rids, plan.samples, strict=True) if samples]
            most = max([most, *(n - since.pop(rid) for rid in done if rid in since)])
            if LONG in done:
                return n, max([most, *(n - at for at in since.values())])
            if n % (1 + 8 * short // step_tokens) == 0:
                engine.arrive(1 + n, short)
                since[1 + n] = n
        raise AssertionError("it has not ended")
    (alone, soon), (steps, waited) = played(1), played(64)
    assert steps <= 1.75 * alone and waited <= 1.5 * soon


def test_a_hit_that_ends_between_multiples_goes_on_to_the_next() -> None:
    engine = Engine(step_tokens=256, chunk_multiple=64)
    first = tuple(range(48))
    engine.events = [Arrived(RequestId(1), (*first, 1, 2), 2)]
    for _ in engine.steps():
        pass
    engine.events = [Arrived(RequestId(2), (*first, *range(900, 1500)), 2)]
    chunks = [(plan.start[0], plan.start[0] + plan.count[0]) for plan in engine.steps()]
    assert chunks[:3] == [(48, 256), (256, 512), (512, 648)]


@pytest.mark.parametrize("group", [
    CacheGroup(name="window", page_bytes=1, window=17),
    CacheGroup(name="states", page_bytes=1, snapshot=True, page_tokens=16)], ids=lambda group: group.name)
@pytest.mark.parametrize("hbm_pages", range(14, 22))
def test_a_prompt_alone_has_room_to_the_next_multiple_or_is_refused(group: CacheGroup, hbm_pages: int) -> None:
    """Of a window all pages that a chunk writes are needed at once, and of states that many."""
    groups = CacheGroup(name="full", page_bytes=1), group
    engine = Engine(hbm_pages=hbm_pages, step_tokens=128, chunk_multiple=64, groups=groups, group_base=1_000)
    engine.arrive(1, 200)
    plans = list(itertools.islice(engine.steps(), 20))
    assert len(plans) < 20 and (not plans or counts(plans[-1])[LONG] == 1), "it has ended, and not given way"


@pytest.mark.parametrize("page_size, hbm_pages, pp_size, window, arrivals", [
    (1, 38, 1, 2, {8: (4, 16), 10: (20, 20)}), (1, 20, 2, 3, {2: (1, 21), 12: (26, 26), 13: (4, 11)}),
    (2, 39, 2, 6, {11: (20, 30), 13: (6, 14), 29: (17, 11), 31: (24, 24), 33: (22, 28)})])
def test_a_turn_ends_when_a_prompt_that_waits_has_taken_all_that_it_can(
        page_size: int, hbm_pages: int, pp_size: int, window: int, arrivals: dict[int, tuple[int, int]]) -> None:
    """It may take a page that an older row waits for: more is evicted for that one, and it goes on, in this turn."""
    groups = CacheGroup(name="full", page_bytes=1), CacheGroup(name="window", page_bytes=1, window=window)
    engine = Engine(page_size=page_size, hbm_pages=hbm_pages, pp_size=pp_size, overlap=True, groups=groups,
                    group_base=1_000, step_tokens=16, chunk_multiple=4 * page_size)
    core, flying, turn = engine.core, list[StepPlan](), 0
    while core.live or turn <= max(arrivals):
        if turn in arrivals:
            engine.arrive(1 + turn, *arrivals[turn])
        turn += 1
        plan = core.advance(engine.events).plan
        engine.events = []
        if plan is None:
            before = core.edges_taken, core.kv.freed
            assert core.advance(()).plan is None and (core.edges_taken, core.kv.freed) == before
        else:
            flying.append(plan)
        if flying and (plan is None or len(flying) == core.cfg.depth):
            done = flying.pop(0)
            engine.events = [Retired(done.step, ((9,),) * sum(done.samples))]


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"chunk_multiple": 4}, {"pp_size": 2, "pp_together": 40}])
@pytest.mark.parametrize("decoding, drafts", [(20, 3), (40, 3), (5, 15)])
def test_drafts_have_of_a_step_what_rows_and_prompts_leave(
        decoding: int, drafts: int, settings: dict[str, object]) -> None:
    engine, prompt = Engine(hbm_pages=4_000, draft_tokens=drafts, **settings), RequestId(1000)
    for rid in range(decoding):
        engine.arrive(1 + rid, 1, new=1_000)
    todo, room = 100, 64 - decoding
    for plan in itertools.islice(engine.steps(), 40):
        if plan.step > 20 and todo:
            count = counts(plan)
            chunk = count.pop(prompt)
            assert chunk == min(todo, room - room % engine.core.cfg.chunk_multiple)
            assert len(count) == decoding and sum(count.values()) == 64 - chunk, "drafts fill what is left"
            todo -= chunk
        if plan.step == 20:
            engine.arrive(prompt, todo)
    assert not todo


def length(short: int) -> tuple[int, int]:
    """Steps from the arrival of 60 tokens behind 1,000,000 to their first, and of the long prompt."""
    engine, begun = Engine(page_size=64, step_tokens=8_192), 0
    engine.arrive(LONG, 1_000_000)
    for n, plan in enumerate(engine.steps(), 1):
        if n == 3 and short:
            engine.arrive(2, short)
        if 2 in plan.rids and not begun:
            begun = n - 3
        if dict(zip(plan.rids, plan.samples, strict=True)).get(LONG):
            return begun, n
    raise AssertionError("it has not ended")


def test_sixty_tokens_behind_a_million_begin_in_the_next_step() -> None:
    (begun, together), (_, alone) = length(60), length(0)
    assert begun == 1 and together <= 1.05 * alone


def test_short_prompts_that_keep_coming_take_a_quarter_of_each_step_at_most() -> None:
    engine = Engine()
    engine.arrive(LONG, 3_000)
    for n, plan in enumerate(engine.steps(), 2):
        if LONG not in plan.rids:
            break
        assert counts(plan)[LONG] >= 48 or sum(plan.samples) > 1, counts(plan)
        if n < 40:
            engine.arrive(n, 16)
            engine.arrive(100 + n, 16)
    assert n > 40


def test_a_short_prompt_is_not_kept_waiting_by_shorter_ones_for_ever() -> None:
    engine, begun = Engine(), 0
    engine.arrive(LONG, 3_000)
    engine.arrive(2, 30)
    for n, plan in enumerate(engine.steps(), 1):
        if not begun and 2 in plan.rids:
            begun = n
        if LONG not in plan.rids:
            break
        if n < 40:
            for i in range(3):
                engine.arrive(100 + 3 * n + i, 16)
    assert 0 < begun <= schedule.PATIENCE_STEPS + 2


@pytest.mark.parametrize("lengths", [
    (100, 60, 5), (3_000, 2_000, 1_000), (128, 6, 6), (60, 3_000), (40,) * 12])
def test_prompts_that_no_long_one_keeps_waiting_are_computed_in_order(lengths: tuple[int, ...]) -> None:
    engine, begun = Engine(), list[int]()
    for rid, tokens in enumerate(lengths, 1):
        engine.arrive(rid, tokens)
    for plan in engine.steps():
        prompts = [rid for rid, start in zip(plan.rids, plan.start, strict=True) if start < lengths[rid - 1]]
        assert prompts == sorted(prompts) and all(
            [rid == prompts[-1] or plan.start[plan.rids.index(rid)] + counts(plan)[rid] == lengths[rid - 1]
             for rid in prompts]), "one began before the end of the one in front"
        begun += [rid for rid in prompts if rid not in begun]
    assert begun == list(range(1, len(lengths) + 1))


def test_a_prefill_instance_leaves_no_token_unused_beside_a_short_prompt() -> None:
    """Its chunks become shorter towards the end of a prompt, and the others get what that leaves."""
    engine = Engine(role="prefill", last_tokens=8)
    engine.arrive(LONG, 3_000, transfer=11)
    engine.arrive(2, 24, transfer=12)
    seen = []
    for _ in range(4):
        plan = engine.core.advance(engine.events).plan
        assert plan is not None
        engine.events = [Retired(plan.step, ((9,),) * sum(plan.samples))]
        seen.append((counts(plan)[LONG], counts(plan).get(2, 0)))
    assert seen == [(52, 12), (56, 8), (60, 4), (64, 0)]


def test_prompts_of_a_higher_priority_still_come_first() -> None:
    engine = Engine()
    engine.arrive(LONG, 3_000)
    seen = []
    for n, plan in enumerate(engine.steps(), 1):
        seen += [rid for rid in plan.rids if rid not in seen]
        if n == 2:
            engine.arrive(2, 1_000, priority=-1)
            engine.arrive(3, 20)
        if n == 3:
            assert counts(plan)[2] == 48 and LONG not in plan.rids and counts(plan)[3] == 16
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("settings", [
    {"overlap": True}, {"pp_size": 2, "overlap": True}, {"draft_tokens": 2},
    {"dram_pages": 20_000, "hot_pages": 4, "always_hosted": True}])
def test_every_kind_of_engine_begins_a_short_prompt_soon(settings: dict[str, object]) -> None:
    engine = Engine(**settings)
    hosted = "hot_pages" in settings
    flying: list[StepPlan] = []
    engine.arrive(LONG, 3_000, selects=hosted)
    engine.arrive(2, 20, selects=hosted)
    for _ in range(400):
        plan = engine.core.advance(engine.events).plan
        engine.core.check()
        engine.events = []
        if plan is not None:
            assert 2 in plan.rids or plan.step > 2 or not plan.rows
            flying.append(plan)
        if flying and (plan is None or len(flying) == engine.core.cfg.depth):
            done = flying.pop(0)
            engine.events = [Retired(done.step, ((9,),) * sum(done.samples))]
        if not engine.core.live:
            return
    raise AssertionError("it has not ended")
