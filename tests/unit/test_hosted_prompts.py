"""A prompt's chunk whose earlier pages lie on the device and on the host, in any order."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from penstock.exec.sparse.prompts import HostedPrompts, PromptChunk
from penstock.kernels.attention import chunk_attention

SIZE, HEADS, QUERIES, DIM, HOT = 4, 2, 4, 8, 3
BACKENDS = {"chunk_attention": "reference", "gather": "reference", "merge": "reference"}
NONE = -1


class Rows:
    """As much of `HotRows` as is asked."""

    def __init__(self) -> None:
        self.hot = SimpleNamespace(pages=lambda _: torch.tensor([30, 31, 32, -1], dtype=torch.int32))
        self.brought = 0

    def __getitem__(self, row: int) -> SimpleNamespace:
        return SimpleNamespace(hot_pages=HOT)

    def window(self, layer: int, row: int, pages: int) -> None:
        self.brought += pages


def pages(kv_2SKH: Tensor, at: list[int], num: int) -> Tensor:
    """A pool [P, K, 2, G, H] with NaN wherever page i of what is given is not at[i]."""
    pool = torch.full((num, HEADS, 2, SIZE, DIM), torch.nan)
    for i, page in enumerate(at):
        if page != NONE:
            part = kv_2SKH[:, i * SIZE:(i + 1) * SIZE]
            pool[page, :, :, :part.shape[1]] = part.permute(2, 0, 1, 3)
    return pool


@pytest.mark.parametrize("start", [28, 27, 25])
@pytest.mark.parametrize("there", [[], [0], [6], [0, 2, 3, 6], [1, 4, 5], [0, 1, 2, 3, 4, 5]], ids=str)
@pytest.mark.parametrize("window", [0, 64])
def test_pages_of_both_tiers_are_read_once_each(start: int, there: list[int], window: int) -> None:
    torch.manual_seed(start)
    kv_2SKH = torch.randn(2, start, HEADS, DIM)
    device = [10 + i if i in there else NONE for i in range(7)]
    host = [20 - i if i not in there else NONE for i in range(7)]
    table = SimpleNamespace(size=SIZE, device_RM=torch.tensor([device], dtype=torch.int32),
                            host_RM=torch.tensor([host], dtype=torch.int32))
    rows = Rows()
    read = HostedPrompts(table, rows, [pages(kv_2SKH, device, 33)], [pages(kv_2SKH, host, 21)],
                         num_kv_heads=HEADS, scale=0.3, backends=BACKENDS, window=window)
    chunk = PromptChunk(0, 0, start, start + 5)
    windows = read.windows(chunk)
    assert sum(w.keys for w in windows) == start
    large = max(HOT, window // SIZE)
    assert len(windows) == -(-len(there) // large) - (-(7 - len(there)) // HOT)
    q_TNH, k_TKH, v_TKH = (torch.randn(5, n, DIM) for n in (QUERIES, HEADS, HEADS))
    out_TNH = read.attend(0, chunk, windows, q_TNH, k_TKH, v_TKH)
    assert rows.brought == 7 - len(there)

    zeros = torch.zeros(start, QUERIES, DIM)             # of queries that came before
    k_SKH, v_SKH = torch.cat((kv_2SKH[0], k_TKH)), torch.cat((kv_2SKH[1], v_TKH))
    whole = chunk_attention.OP.use("reference")
    want_SNH, _ = whole(torch.cat((zeros, q_TNH)), k_SKH, v_SKH, causal=True, scale=0.3)
    torch.testing.assert_close(out_TNH, want_SNH[start:], rtol=1e-5, atol=1e-5)
