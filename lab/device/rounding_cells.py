"""How far logprobs of one cell of the matrix are off by rounding alone: other types and layouts of the same engine.

    cp lab/device/rounding_cells.py tests/equal/test_rounding_cells.py
    python -m pytest -q -s --device cuda tests/equal/test_rounding_cells.py; rm tests/equal/test_rounding_cells.py

Prints, by weights, KV type and way to run, the most and the 90th percentile of |logprob - that of one rank in
bfloat16|.
On a CPU (GGUF), of weights as they are drawn: fp8 KV: float32 .18, tp2 .09, pp2>tp2 .04; bfloat16 KV: .06, .06, .04. Of
those of the matrix, `faint`: fp8 KV: .034, .022, .015. Pages of another prompt: .3 to .6.
"""
from __future__ import annotations

import math
from pathlib import Path

import pytest
import test_cover
from pair_engines import engines
from test_cover import ASKED, Said, chosen, made, said
from test_same_tokens import KINDS, read


def gaps(found: Said, want: Said) -> list[float]:
    out = []
    for (tokens, given), (rights, best) in zip(found, want, strict=True):
        for token, one, right, other in zip(tokens, given, rights, best, strict=True):
            out.append(abs(one.logprob - dict(other.top).get(token, math.inf)))
            if token != right:
                break
    return sorted(out)


@pytest.mark.parametrize(("weights", "kv"), [("drawn", "fp8"), ("drawn", "auto"), ("faint", "fp8")])
def test_rounding(weights: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if weights == "drawn":
        monkeypatch.setattr(test_cover, "changed", lambda cell: {})
    cell = chosen("cpu")[0]._replace(kind="fp8kv", weights="packed", place="resident", across="both")
    model, own = made(tmp_path, cell)
    options = {**KINDS["fp8kv"].options, "kv_cache_memory_bytes": "4M", "kv_offloading_size": "0",
               "max_model_len": 512, "kv_cache_dtype": kv}
    ways = {"bfloat16": ("one", {"dtype": "bfloat16"}), "packed": ("one", own),
            "float32": ("one", {"dtype": "float32"}),
            "one by one": ("one", {"dtype": "bfloat16", "max_num_seqs": 1}),
            "small chunks": ("one", {"dtype": "bfloat16", "max_num_batched_tokens": 16}),
            "tp2": ("tp2", {"dtype": "bfloat16"}), "pp2>tp2": ("pp2>tp2", {"dtype": "bfloat16"}),
            "tp2 packed": ("tp2", own), "pp2>tp2 packed": ("pp2>tp2", own)}
    found: dict[str, Said] = {}
    for name, (layout, more) in ways.items():
        with engines(model, tmp_path, read(layout)[0], **{**options, **more}) as tried:
            tried.say(ASKED, logprobs=5)
            found[name] = said(tried)
        for base in ("bfloat16", "packed"):
            if base in found:
                gap = gaps(found[name], found[base])
                print(f"{weights} weights, {kv} KV, {name} against {base}: most {gap[-1]:.3f}, "
                      f"90 % {gap[int(.9 * len(gap))]:.3f}")
