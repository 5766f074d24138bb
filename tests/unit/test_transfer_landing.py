"""Pages that another engine writes: which it is granted, and that nothing else is written."""
from __future__ import annotations

import pytest
import torch
from pair_ends import BOUNDS, check, pages_for, transfer_all

from penstock.core.pair.messages import End as Over
from penstock.core.plan import Tier
from penstock.transfer import session


@pytest.mark.parametrize("sizes", [(8, 8), (16, 8), (8, 16), (4, 16)])
@pytest.mark.parametrize("limit", [600, 1 << 20])
def test_a_group_that_is_granted_twice_lands_in_both(sizes: tuple[int, int], limit: int, ends, monkeypatch) -> None:
    """Summaries on the device, and their whole pages on the host too."""
    monkeypatch.setattr(session, "PAYLOAD_MAX", limit)
    prefill = ends("prefill", "127.0.0.1:0", page_size=sizes[0])
    decode = ends("decode", prefill.link.address, page_size=sizes[1])
    assert prefill.up() == decode.up() == 1
    whole = 61 // sizes[1] * sizes[1] - 16
    below = pages_for(decode, Tier.DRAM, BOUNDS, 16, whole)
    granted = decode.grant

    def twice(epoch: int, move) -> None:
        granted(epoch, move)
        if move.group == BOUNDS:
            granted(epoch, decode.move(Tier.DRAM, BOUNDS, below, 16, whole, to_peer=False))

    monkeypatch.setattr(decode, "grant", twice)
    given, heard = transfer_all(prefill, decode, 1, 61, start=16, chunk=16)
    assert heard.message == Over(1, 1, 61, (7,))
    host, device = decode.pools.of(Tier.DRAM, BOUNDS)[0], decode.pools.of(Tier.HBM, BOUNDS)[0]
    for down, up in zip(below, given[BOUNDS], strict=False):
        assert torch.equal(host.page(down), device.page(up))
        host.page(down).view(torch.uint8).fill_(0xEE)
    check(decode, given, 61, start=16)                          # and nothing else was written


def test_a_group_that_is_granted_twice_in_one_tier_is_our_bug(ends) -> None:
    prefill = ends("prefill", "127.0.0.1:0")
    decode = ends("decode", prefill.link.address)
    assert prefill.up() == decode.up() == 1
    move = decode.move(Tier.HBM, BOUNDS, pages_for(decode, Tier.HBM, BOUNDS, 0, 16), 0, 16, to_peer=False)
    decode.grant(1, move)
    with pytest.raises(AssertionError, match="granted twice"):
        decode.grant(1, move)
