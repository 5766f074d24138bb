"""Several engines at either end of a pair say what one engine says, and those that are left go on."""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from pair_engines import LIMIT_S, End, whole
from pair_server import SERVED, prompts, said, serving
from pipeline_engine import checkpoint

from penstock.engine.wire import BootstrapRoom

PLACES = {
    "resident": {"kv_cache_memory_bytes": "4M"},
    "hosted": {"kv_cache_memory_bytes": "2M", "kv_offloading_size": "8M", "sparse_top_k": 96, "host_decode": "always"},
}
PROMPTS = [[(i * i * k + 3 * i) % 97 for i in range(150 + 10 * k)] for k in range(1, 7)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("many"))


def until(ends: list[End], done: Callable[[], object]) -> None:
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < LIMIT_S, [end.peers.missing for end in ends]
        for end in ends:
            end.turn()


def opened(stack: ExitStack, model: str, folder: Path, prefill: int, decode: int,
           **options: object) -> tuple[list[End], list[End]]:
    key = folder / "key"
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    sockets = [f"unix:{folder}/socket{n}" for n in range(prefill)]
    flags = {"pair_key_file": str(key), **options}
    ends: tuple[list[End], list[End]] = [], []
    for socket in sockets:
        ends[0].append(End(model, "prefill", disaggregation_listen=socket, **flags))
        stack.callback(ends[0][-1].close)
    for _ in range(decode):
        ends[1].append(End(model, "decode", disaggregation_connect=sockets, **flags))
        stack.callback(ends[1][-1].close)
    until([*ends[0], *ends[1]], lambda: not any(end.peers.missing for end in ends[1]))
    return ends


@pytest.mark.parametrize("place", PLACES)
def test_two_decode_ends_of_one_prefill_end_under_alike_numbers(model, tmp_path, place):
    want = list(whole(model, PROMPTS, **PLACES[place]).got.values())
    with ExitStack() as stack:
        [prefill], decode = opened(stack, model, tmp_path, 1, 2, **PLACES[place])
        half = PROMPTS[:3], PROMPTS[3:]
        for end, mine in zip(decode, half, strict=True):
            for prompt in mine:
                end.submit(prompt)
        until([prefill, *decode], lambda: not any(end.open for end in decode))
        assert [*decode[0].got.values(), *decode[1].got.values()] == want
        assert all(end.loop.stats()["pair_delivered_total"] == 3 for end in decode)
        # One goes while both have asked; its place and its pages are free again, and the other hears nothing.
        for end in decode:
            end.submit([*PROMPTS[0], 1, 2, 3] * 3)
        until([prefill, *decode], lambda: len(prefill.core.live) == 2)
        decode[0].close()
        until([prefill, decode[1]], lambda: not decode[1].open and not prefill.core.live)
        assert decode[1].ended[4].finish == "length" and decode[1].cached[4].peer_tokens > 200
        assert not prefill.peers.missing and sum(bool(peer.epoch) for peer in prefill.peers.each) == 1


@pytest.mark.parametrize("place", PLACES)
def test_two_prefill_ends_share_the_prompts_of_a_decode_end(model, tmp_path, place):
    want = list(whole(model, PROMPTS, **PLACES[place]).got.values())
    with ExitStack() as stack:
        prefill, [decode] = opened(stack, model, tmp_path, 2, 1, **PLACES[place])
        for prompt in PROMPTS:
            decode.submit(prompt)
        until([*prefill, decode], lambda: not decode.open)
        assert list(decode.got.values()) == want
        assert [peer.stats()["pair_delivered_total"] for peer in decode.peers.each] == [3, 3]
        prefill[0].close()
        until([prefill[1], decode], lambda: decode.peers.missing)
        assert str(tmp_path / "socket0") in decode.peers.missing
        rids = [decode.submit(prompt) for prompt in PROMPTS]
        until([prefill[1], decode], lambda: not decode.open)
        assert [decode.got[rid] for rid in rids] == want
        assert decode.peers.each[1].stats()["pair_delivered_total"] == 3 + len(PROMPTS)


def test_a_prefill_end_that_knows_no_rooms_computes_what_was_sent_to_one(model, tmp_path):
    """A decode instance behind a router may call one that is not."""
    with ExitStack() as stack:
        [prefill], [decode] = opened(stack, model, tmp_path, 1, 1, **PLACES["resident"])
        decode.submit(PROMPTS[0], room=BootstrapRoom(7, address=f"unix:{tmp_path}/socket0"))
        until([prefill, decode], lambda: not decode.open and not prefill.core.live)
        assert decode.ended[1].finish == "length" and decode.loop.stats()["pair_delivered_total"] == 1


@pytest.mark.sweep
def test_engines_of_either_end_are_killed_and_the_others_answer(model, tmp_path):
    with serving(model, tmp_path, *SERVED["resident"]) as one:
        want = [said(one.ask(prompt))[0] for prompt in prompts()]
    with serving(model, tmp_path, *SERVED["resident"], "--prefill-replicas", "2", "--decode-replicas", "2") as all_of:
        info = all_of.info()
        assert info["dp_size"] == 2 and not info["prefill"]["missing"]
        for rank in (0, 1):
            assert [said(all_of.ask(p, data_parallel_rank=rank))[0] for p in prompts()] == want
        text = all_of.http.get("/metrics").text
        assert 'penstock:prefill_steps_total{engine="1"}' in text
        victims = info["prefill"]["pid"], info["engines"][1]["pid"]
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(all_of.ask, p, cache_salt="x", data_parallel_rank=0) for p in prompts()]
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            assert [said(w.result())[0] for w in waiting] == want
        all_of.until(lambda: all_of.http.get("/health").json() == {"status": "ok"})
        after = all_of.info()
        assert after["prefill"]["restarts"] == 1 and [e["restarts"] for e in after["engines"]] == [0, 1]
        assert [said(all_of.ask(p, data_parallel_rank=1))[0] for p in prompts()] == want
