"""Whom a decode instance calls that a router has told where to connect."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.config.base.errors import ConfigError
from penstock.core.plan import PeerId
from penstock.engine import wire
from penstock.engine.pd.remote import Peer
from penstock.engine.pd.router import Peers
from penstock.engine.process import tell


class Silent:
    """A link that notes whom it was told to call."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def call(self, address: str) -> None:
        self.called.append(address)


def peers(*allowed: str, num: int = 2) -> Peers:
    return Peers(*(Peer(Silent(), "decode", id=PeerId(n)) for n in range(num)), routed=True, allowed=allowed)


def test_hosts_that_are_not_on_the_list_are_not_called() -> None:
    some = peers("Alpha", "[fe80::1]")
    for address in ("beta:1", "alpha.evil:1", "[fe80::2]:1"):
        with pytest.raises(ConfigError, match="--disaggregation-allow alpha, fe80::1"):
            some.at(address)
    assert some.at("alpha:1").address == "alpha:1"
    assert some.at("[fe80::1]:2").address == "[fe80::1]:2"


def test_without_a_list_any_host_is_called_and_a_place_is_given_to_another() -> None:
    some = peers(num=1)
    first = some.at("a:1")
    assert some.at("a:1") is first and some.at("b:1") is first and first.address == "b:1"


def test_one_of_two_prefill_instances_is_enough_to_be_connected() -> None:
    some = Peers(*(Peer(Silent(), "decode", address, id=PeerId(n)) for n, address in enumerate(("a:1", "b:1"))))
    sent = list[wire.PeerNews]()
    for epoch in (0, 1):
        some.each[1].session, some.each[1].missing = SimpleNamespace(epoch=epoch), "" if epoch else "no connection yet"
        tell(some, SimpleNamespace(send=sent.append), "")
    assert [news.connected for news in sent] == [False, True]
    assert [news.missing for news in sent] == ["a:1: no connection yet; b:1: no connection yet",
                                              "a:1: no connection yet"]
