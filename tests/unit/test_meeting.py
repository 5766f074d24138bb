"""What TP ranks tell each other before they add: all hear the same, and where one cannot, none does."""
from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from penstock.exec.pipeline import collectives
from penstock.exec.pipeline.collectives import NcclGroup, Rendezvous
from penstock.exec.pipeline.p2p_allreduce import P2PAllReduce
from penstock.model.parts import TpRank

SOON, LATER = timedelta(seconds=0.05), timedelta(seconds=30)


def meetings(size: int) -> list[Rendezvous]:
    """What one sets all others hear, as by the front."""
    made: list[Rendezvous] = []

    def tell(own: int) -> Callable[[str, bytes], None]:
        return lambda key, value: [m.heard(key, value) for i, m in enumerate(made) if i != own]

    made += [Rendezvous(tell(i)) for i in range(size)]
    return made


def together(size: int, run: Callable[[int, Rendezvous], None]) -> None:
    threads = [threading.Thread(target=run, args=(i, one)) for i, one in enumerate(meetings(size))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    assert not any(one.is_alive() for one in threads)


def test_each_lane_hears_what_all_say_in_their_order() -> None:
    heard: dict[int, list[bytes]] = {}

    def run(index: int, rendezvous: Rendezvous) -> None:
        heard[index] = rendezvous.exchange("a", bytes([index]), TpRank(index, 3), LATER)
    together(3, run)
    assert list(heard.values()) == [[b"\0", b"\1", b"\2"]] * 3


def test_who_does_not_come_is_waited_for_no_longer_than_that() -> None:
    with pytest.raises(RuntimeError, match=r"no other TP rank has come in 0\.05 s"):
        meetings(2)[0].exchange("a", b"", TpRank(0, 2), SOON)


@pytest.mark.parametrize("why", [b"", b"no way between these GPUs"])
def test_one_lane_that_cannot_takes_all_to_nccl(monkeypatch: pytest.MonkeyPatch, why: bytes) -> None:
    """Near's first half is of a device: here the second TP rank says that it did not go."""
    class Trial(P2PAllReduce):
        def __init__(self, tp_rank: TpRank, exchange: Callable[[str, bytes], list[bytes]]) -> None:
            self._agree(exchange("reached", why if tp_rank.index == 1 else b""))

    class Ranks:
        def __init__(self, unique: bytes, index: int, size: int) -> None:
            pass

    monkeypatch.setattr(collectives, "P2PAllReduce", Trial)
    monkeypatch.setattr(collectives, "Communicator", Ranks)
    monkeypatch.setattr(collectives, "unique_id", lambda: b"id")
    near: dict[int, bool] = {}
    said: list[str] = []

    def run(index: int, rendezvous: Rendezvous) -> None:
        made = NcclGroup(rendezvous, TpRank(index, 2), 30.0, "127.0.0.1", lambda line: said.append(str(line)))
        near[index] = made._near is not None
    together(2, run)
    assert set(near.values()) == {not why} and len(near) == 2
    assert said == [f"TP ranks add by NCCL alone: {why.decode()}" if why else
                    "TP ranks add small tensors in each other's memory, others by NCCL"] * 2
