"""Ends of pairs that a router makes: bodies as sglang-router and smg send them, and what goes wrong."""
from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from pair_server import SERVED, Server, key_file, prompts, said
from pipeline_engine import checkpoint

ROOM_S = 2.0
HOST = "127.0.0.1"


def same(answer: dict, want: tuple) -> None:
    """Other chunks, as of prompts of which other parts were cached, move a logprob's last bits."""
    ids, logprobs, finish = said(answer)
    assert (ids, finish) == (want[0], want[2]) and logprobs == pytest.approx(want[1], abs=1e-4)


class Ends:
    """A prefill instance and two decode instances behind a router that is this test."""

    def __init__(self, stack: ExitStack, model: str, folder, dialect: str) -> None:
        both = (*SERVED["resident"], *key_file(folder), "--router-dialect", dialect, "--disaggregation-mode")
        self.dialect, self.room = dialect, 7 << 50
        self.prefill = Server(model, folder / "prefill", *both, "prefill", "--disaggregation-listen", f"{HOST}:0",
                              "--disaggregation-timeout-s", str(ROOM_S))
        stack.callback(self.prefill.close)
        self.decode = [Server(model, folder / f"decode{n}", *both, "decode") for n in range(2)]
        for server in self.decode:
            stack.callback(server.close)
        self.port = int(self.prefill.info()["pair_address"].rpartition(":")[2])

    def bootstrap(self) -> dict[str, object]:
        self.room -= 1                                  # a router's need not rise
        return {"bootstrap_host": HOST, "bootstrap_port": self.port, "bootstrap_room": self.room}

    def ask(self, decode: Server, prompt: list[int], **more: object) -> tuple[dict, dict]:
        """What the prefill instance says, and the decode instance."""
        if self.dialect == "vllm":
            first = self.prefill.ask(prompt, **more, max_tokens=1)
            return first, decode.ask(prompt, **more, kv_transfer_params=first["kv_transfer_params"])
        given = {**more, **self.bootstrap()}
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(server.ask, prompt, **given) for server in (self.prefill, decode)]
            return asked[0].result(), asked[1].result()

    def left(self) -> None:
        """Until nothing is held anywhere."""
        for server in (self.prefill, *self.decode):
            server.flushed()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return checkpoint(tmp_path_factory.mktemp("rooms"))


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def ends(request, model, tmp_path_factory):
    with ExitStack() as stack:
        yield Ends(stack, model, tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def want(model, tmp_path_factory) -> list[tuple]:
    server = Server(model, tmp_path_factory.mktemp("one") / "log", *SERVED["resident"])
    try:
        return [said(server.ask(prompt)) for prompt in prompts()]
    finally:
        server.close()


@pytest.mark.sweep
def test_either_decode_end_says_what_one_engine_says_and_the_prefill_end_has_computed_it(ends, want):
    for n, prompt in enumerate([*prompts(), *prompts()]):
        first, answer = ends.ask(ends.decode[n % 2], prompt)
        assert first["status"] == 200 and first["usage"]["prompt_tokens"] == len(prompt), first
        same(answer, want[n % 4])
    assert sum(d.stats()["pair_delivered_total"] for d in ends.decode) == 8
    assert all(d.stats()["pair_delivered_total"] for d in ends.decode)
    # The prefill instance is asked for one token, of how many there must be.
    same(ends.ask(ends.decode[0], prompts()[0], min_tokens=9)[1], want[0])
    # Two choices of one request are two of the room's.
    _, two = ends.ask(ends.decode[0], prompts()[0], n=2, temperature=1, seed=3)
    assert len(two["choices"]) == 2 and two["choices"][0] != two["choices"][1]
    assert two["usage"]["prompt_tokens_details"]["remote_tokens"] + two["usage"]["prompt_tokens_details"][
        "cached_tokens"] == 150
    ends.left()


@pytest.mark.sweep
def test_a_room_that_nobody_asks_for_is_over_in_time_and_its_pages_are_free(ends):
    if ends.dialect == "vllm":
        first = ends.prefill.ask(prompts()[0], max_tokens=1)
        assert ends.prefill.stats()["hbm_pages_held"] > 0       # it waits with its KV
        given = {"kv_transfer_params": first["kv_transfer_params"]}
        time.sleep(ROOM_S)
    else:
        given = ends.bootstrap()
        nobody = ends.prefill.ask(prompts()[0], **given)
        assert (nobody["status"], nobody["error"]["code"]) == (504, "room_late"), nobody
    ends.prefill.flushed()
    late = ends.decode[0].ask(prompts()[0], **given)
    assert (late["status"], late["error"]["code"]) == (504, "room_late"), late
    ends.left()


@pytest.mark.sweep
def test_a_room_is_of_one_request(ends, want):
    """Not of a second one, nor of one with another prompt, whose KV would be wrong."""
    if ends.dialect == "vllm":
        first = ends.prefill.ask(prompts()[0], max_tokens=1)
        given = {"kv_transfer_params": first["kv_transfer_params"]}
        other = ends.decode[1].ask(prompts()[2], **given)
        assert (other["status"], other["error"]["code"]) == (400, "room_taken"), other
        same(ends.decode[0].ask(prompts()[0], **given), want[0])
    else:
        given = ends.bootstrap()
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(ends.prefill.ask, prompts()[0], **given)
            ends.prefill.until(lambda: ends.prefill.stats()["hbm_pages_held"] > 0)
            twice = ends.prefill.ask(prompts()[0], **given)
            assert (twice["status"], twice["error"]["code"]) == (400, "room_taken"), twice
            other = ends.decode[1].ask(prompts()[2], **given)
            assert (other["status"], other["error"]["code"]) == (400, "room_taken"), other
            same(ends.decode[0].ask(prompts()[0], **given), want[0])
            assert first.result()["status"] == 200
    again = ends.decode[1].ask(prompts()[0], **given)
    assert (again["status"], again["error"]["code"]) == (400, "room_taken"), again
    ends.left()


@pytest.mark.sweep
def test_what_a_router_may_not_say(ends):
    wrong = [{"bootstrap_room": 1}, {"bootstrap_host": "unix", "bootstrap_port": 1, "bootstrap_room": 1},
             {"bootstrap_host": HOST, "bootstrap_port": 1 << 16, "bootstrap_room": 1},
             {"bootstrap_host": HOST, "bootstrap_port": 1, "bootstrap_room": -1}]
    if ends.dialect == "vllm":
        names = {"bootstrap_host": "host", "bootstrap_port": "port", "bootstrap_room": "room"}
        wrong = [{"kv_transfer_params": {names[k]: v for k, v in w.items()}} for w in wrong] + wrong[:1]
    for given in wrong:
        answer = ends.decode[0].ask(prompts()[0], **given)
        assert answer["status"] == 400 and answer["error"]["param"], answer
    # Nobody listens there: as without a prefill instance.
    nobody = {"bootstrap_host": HOST, "bootstrap_port": 9, "bootstrap_room": 1}
    if ends.dialect == "vllm":
        nobody = {"kv_transfer_params": {"host": HOST, "port": 9, "room": 1}}
    answer = ends.decode[0].ask(prompts()[0], **nobody)
    assert answer["status"] == 200 and "remote_tokens" not in answer["usage"]["prompt_tokens_details"]
    if ends.dialect == "sglang":
        assert ends.prefill.ask(prompts()[0])["error"]["param"] == "bootstrap_room"
    ends.left()
