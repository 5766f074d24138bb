"""Who of several engines gets a prompt: by what each has been sent, and by how much each has to do."""
from __future__ import annotations

import asyncio
import random
import threading

import pytest

from penstock.config.base.errors import RequestError
from penstock.config.request.params import SamplingParams
from penstock.config.settings.cli import from_options
from penstock.engine.client import replicas as client
from penstock.engine.client.affinity import Load, least
from penstock.engine.client.client import EngineDied
from penstock.engine.client.replicas import Engines, pages_of, together
from penstock.engine.wire import NO_ORIGIN, EngineReady

PAGE, ROWS = 16, 4
ONE = SamplingParams(max_tokens=1)


class Fake:
    """An EngineClient of which nothing ends but by `done`."""

    def __init__(self, pages: int = 1000) -> None:
        self.ready = EngineReady(pid=1, vocab_size=99, max_model_len=10_000, info={
            "page_size": PAGE, "hbm_pages": pages, "dram_pages": 0, "max_num_seqs": ROWS})
        self.died: EngineDied | None = None
        self.prompts: list[tuple[int, ...]] = []
        self.num_waiting = self.num_running = self.flushed = 0

    def submit(self, prompt, params, *, eos_ids=(), namespace=0, room=None, origin=NO_ORIGIN):
        self.prompts.append(tuple(prompt))
        self.num_running += params.n
        return [object()] * params.n

    def done(self) -> None:
        self.num_running = 0

    def flush(self) -> None:
        self.flushed += 1


def engines(count: int, **how: int) -> tuple[Engines, list[Fake]]:
    several = Engines(from_options("demo", {"dp": count}), print, lambda _: None)
    fakes = [Fake(**how) for _ in range(count)]
    for member, fake in zip(several.members, fakes, strict=True):
        member.last = fake
    return several, fakes


def chat(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(99), k=tokens)


def test_a_conversation_stays_where_its_pages_are_and_others_spread():
    several, fakes = engines(3)
    for turn in range(4):
        for who in range(30):
            several.submit(chat(who, 100 + 40 * turn), ONE)
            if who % 3 == 2:
                for fake in fakes:
                    fake.done()
    where = [{prompt[:100] for prompt in fake.prompts} for fake in fakes]
    assert all(len(fake.prompts) == 4 * len(mine) for fake, mine in zip(fakes, where, strict=True))
    assert [len(mine) for mine in where] == [10, 10, 10]


def test_what_everybody_begins_with_keeps_nobody_from_an_idle_engine():
    several, fakes = engines(2)
    system = chat(0, 10 * PAGE)
    for who in range(1, 9):
        several.submit(system + chat(who, 20), ONE)
    assert [fake.num_running for fake in fakes] == [4, 4]
    several, fakes = engines(2)
    system = chat(0, 200 * PAGE)                    # it is worth waiting for, up to a point
    for who in range(1, 40):
        several.submit(system + chat(who, 20), ONE)
    assert min(fake.num_running for fake in fakes) > 10


def test_an_equal_prefix_goes_to_the_lesser_load_and_a_tie_of_all_to_the_first():
    several, fakes = engines(2)
    several.submit(chat(1, 50), ONE)
    several.submit(chat(2, 50), ONE)
    assert [len(fake.prompts) for fake in fakes] == [1, 1]
    fakes[0].done()
    several.submit(chat(3, 10), ONE)                # no whole page
    assert fakes[0].prompts[-1] == tuple(chat(3, 10))
    several.submit(chat(4, 50), SamplingParams(max_tokens=1, n=2))
    assert [fake.num_running for fake in fakes] == [3, 1]


def test_others_salts_and_other_beginnings_are_no_prefix():
    prompt = chat(1, 5 * PAGE + 3)
    pages = pages_of(prompt, 0, PAGE)
    assert len(pages) == 5 == len(set(pages))
    assert pages_of(prompt[:2 * PAGE], 0, PAGE) == pages[:2]
    assert not set(pages) & set(pages_of(prompt, 1, PAGE))
    assert not set(pages) & set(pages_of([prompt[0] + 1, *prompt[1:]], 0, PAGE))
    assert pages_of([1 << 70] * 20, 0, PAGE) == [] == pages_of(prompt[:PAGE - 1], 0, PAGE)


def test_it_forgets_what_an_engine_has_no_room_for_and_has_flushed_or_died_with():
    several, (one, _) = engines(2, pages=6)
    member = several.members[0]
    first, second = (pages_of(chat(who, 4 * PAGE), 0, PAGE) for who in (1, 2))
    member.sent(first)
    member.sent(second)
    assert (member.cached(first), member.cached(second)) == (2, 4)       # its end went first
    several.flush()
    assert member.cached(second) == 0 and one.flushed == 1
    member.sent(second)
    member.last = Fake()
    assert member.cached(second) == 0


def test_a_choice_asks_each_engine_for_few_pages_of_a_long_prompt():
    several, _ = engines(8, pages=10_000)
    pages = pages_of(chat(1, 4_096 * PAGE), 0, PAGE)
    for n, member in enumerate(several.members):
        member.sent(pages[:500 * n])
    asked = []

    class Asked(list):
        def __getitem__(self, n):
            asked.append(n)
            return super().__getitem__(n)

    assert [member.cached(Asked(pages)) for member in several.members] == [500 * n for n in range(8)]
    assert len(asked) <= 8 * 13


def test_a_long_prompt_is_hashed_on_another_thread_and_placed_as_before(monkeypatch):
    several, fakes = engines(2, pages=10_000)
    long, short = chat(1, client.HASH_INLINE + PAGE), chat(2, client.HASH_INLINE)
    threads = []

    def seen(*args):
        threads.append(threading.current_thread() is threading.main_thread())
        return pages_of(*args)

    monkeypatch.setattr(client, "pages_of", seen)
    assert asyncio.run(several.hashed(short, 7)) is short and not threads
    hashed = asyncio.run(several.hashed(long, 7))
    assert threads == [False] and hashed == long
    several.submit(hashed, ONE, namespace=7)
    assert threads == [False] and fakes[0].prompts == [tuple(long)]
    assert several.members[0].cached(pages_of(long, 7, PAGE)) == len(long) // PAGE
    several.of(1).submit(hashed, ONE, namespace=7)
    assert threads == [False] and several.members[1].cached(pages_of(long, 7, PAGE)) == len(long) // PAGE
    assert several.members[1].cached(pages_of(long, 8, PAGE)) == 0, "another namespace"
    alone, _ = engines(1)
    assert asyncio.run(alone.hashed(long, 7)) is long


def test_a_dead_engine_gets_nothing_unless_it_is_asked_for():
    several, fakes = engines(2)
    prompt = chat(1, 300)
    several.submit(prompt, ONE)
    fakes[0].died = EngineDied(-9)
    several.submit(prompt, ONE)
    assert [len(fake.prompts) for fake in fakes] == [1, 1]
    assert several.missing == "engine 0: the engine process was killed by signal 9"
    several.of(0).submit(prompt, ONE)               # a real one raises EngineDied
    assert len(fakes[0].prompts) == 2


def test_a_prefill_instance_is_connected_if_an_engine_that_serves_has_one():
    several, fakes = engines(2)
    fakes[0].peer_connected, fakes[1].peer_connected = True, False
    assert several.peer_connected
    fakes[0].died = EngineDied(-9)
    assert not several.peer_connected


def test_a_rank_is_obeyed_and_its_prompt_is_known():
    several, fakes = engines(2)
    for _ in range(3):
        several.of(1).submit(chat(1, 300), ONE)
    several.submit(chat(1, 320), ONE)
    assert [len(fake.prompts) for fake in fakes] == [0, 4]
    for rank in (-1, 2):
        with pytest.raises(RequestError, match=r"data_parallel_rank is -?\d: this server has 0 to 1") as e:
            several.of(rank)
        assert e.value.param == "data_parallel_rank"


def test_numbers_of_all_are_sums_but_of_the_storage_that_they_share():
    assert together([{"steps": 2.0, "storage_bytes": 9.0}, {"steps": 3.0, "storage_bytes": 8.0}]) == {
        "steps": 5.0, "storage_bytes": 9.0}


def test_load_is_shared_evenly_by_prompts_that_nobody_has_seen():
    several, fakes = engines(4)
    for who in range(400):
        several.submit(chat(who, 40), ONE)
    assert [len(fake.prompts) for fake in fakes] == [100] * 4


def test_the_pages_of_a_long_prompt_are_noted_over_turns_of_the_event_loop():
    several, _ = engines(2, pages=20_000)
    one, other = several.members
    pages = list(range(3 * client.NOTED_INLINE + 5))

    async def main() -> None:
        one.sent(pages)
        other.sent(pages)
        assert one.cached(pages) == client.NOTED_INLINE        # where it begins
        other.last = Fake()
        for _ in range(8):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert one.cached(pages) == len(pages) and next(reversed(one._pages._known)) == 0       # its end goes first
    assert other.cached(pages) == 0, "another engine has been sent nothing"


def test_long_prompts_that_begin_alike_go_to_all_engines_and_a_conversation_stays():
    """24 agents with a prompt of 24,000 tokens, of which 8,000 are everybody's."""
    num_open, cached = [0] * 8, [0] * 8
    for _ in range(24):
        chosen = least(24_000, 1, [Load(n, k, 16) for n, k in zip(cached, num_open, strict=True)])
        num_open[chosen] += 1
        cached[chosen] = 8_000
    assert max(num_open) <= 5 and min(num_open) >= 2
    assert least(100_000, 1, [Load(99_000, 4, 16), *[Load(8_000, 0, 16)] * 7]) == 0
