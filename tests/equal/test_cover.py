"""Each pair of what can be combined, in few engines: models, places, layouts and weights, with all features at once.

`cells.cover` chooses among all that is not refused. An engine's tokens are those of one rank that reads all from its
device, with the same weights, and so are its logprobs. Kernels round as layouts cut: where weights are not float32 the
first token that differs is one that the rank gives nearly the logprob of its own. That holds where rounding changes no
choice, so models with an indexer have the weights of `steady`; where fp8 KV makes much of what is rounded, `faint`.
"""
from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import where
from cells import Cell, cells, cover
from combos import refusals_of
from packers import packed_checkpoint
from pair_engines import Engines, engines
from pipeline_engine import SINKS, STATES, Change, checkpoint, fp8_checkpoint, gguf_checkpoint
from steady import WIDE, faint, steady
from test_same_tokens import ATTEMPTS, KINDS, LATENT, MINIMAX_M3, MOE, ODD, pools, read

from penstock.core.plan import Paused
from penstock.engine.wire import Flush, TokenLogprob

CONFIGS = {"ordinary": ODD, "selecting": ODD, "fp8kv": {**ODD, "head_dim": 16}, "latent": {**LATENT, **WIDE},
           "experts": MOE, "windows": SINKS, "states": STATES, "minimax-m3": {**MINIMAX_M3, **WIDE}}
LAYOUTS = {"one": "one", "pp": "pp2", "tp": "tp2", "nodes": "pp2.n2", "pair": "one>one", "both": "pp2>tp2"}
FORMS = {"channel": "fp8", "int4": "int4", "nvfp4": "nvfp4"}
LATER = ("minimax-m3",)
ROOM = {"minimax-m3": {"kv_cache_memory_bytes": "2M"}}          # three KV heads of 32
FEATURES = "plain tier cache paused stored"
# Logprobs may differ by so much: of float32, of others.
EXACT, NEAR = (1e-3, 0.1) if where.DEVICE == "cpu" else (2e-2, 0.2)
ASKED = [(prompt, 12) for prompt, _ in KINDS["ordinary"].asked()]


def indexed(kind: str) -> bool:
    """An indexer of the model's own selects: its weights are those of `steady`."""
    return "index_n_heads" in CONFIGS[kind]


def chosen(device: str) -> list[Cell]:
    """Each stands for all features, and none of them is refused. Kinds of LATER add cells and change no others."""
    allowed = [cell for cell in cells() if cell.device == device and cell.feature == "plain" and not any(
        map(list, (refusals_of(cell._replace(feature=feature)) for feature in FEATURES.split())))]
    found = cover(cell for cell in allowed if cell.kind not in LATER)
    return found + cover(allowed, found)


def changed(cell: Cell) -> dict[str, Change]:
    """What is changed of the weights that are drawn, if anything."""
    if indexed(cell.kind):
        return {"change": steady(CONFIGS[cell.kind])}
    return {"change": faint} if cell.kind == "fp8kv" and cell.weights in ("gguf", "packed") else {}


def made(folder: Path, cell: Cell) -> tuple[str, dict[str, object]]:
    """A checkpoint, and the options that its weights need."""
    config, more = CONFIGS[cell.kind], changed(cell)
    match cell.weights:
        case "fp8":
            return fp8_checkpoint(folder / "model", config, **more), {}
        case "gguf" | "packed":
            wide = {**config, "intermediate_size": 96, "moe_intermediate_size": 32, "hidden_size": 64}
            return (gguf_checkpoint(folder / "model.gguf", wide, **more),
                    {"dtype": "gguf" if cell.weights == "packed" else "float32"})
        case "channel" | "int4" | "nvfp4":
            return packed_checkpoint(folder, config, FORMS[cell.weights], **more)[0], {}
        case _:
            return checkpoint(folder / "model", config, **more), {"dtype": cell.weights}


Said = list[tuple[list[int], list[TokenLogprob]]]


def said(tried: Engines) -> Said:
    """Of each prompt that was asked last."""
    return [(tried.asked.got[rid], tried.asked.logprobs[rid]) for rid in tried.newest]


def differs(found: Said, want: Said, bound: float) -> str:
    """How they do; tokens alone may within `bound`, and what follows on such a one is not looked at."""
    for number, ((tokens, given), (rights, best)) in enumerate(zip(found, want, strict=True)):
        assert len(tokens) == len(given) == len(rights) == len(best)
        for i, (token, one, right, other) in enumerate(zip(tokens, given, rights, best, strict=True)):
            apart = abs(one.logprob - dict(other.top).get(token, math.inf))
            if apart > bound or (token != right and bound == EXACT):
                return f"prompt {number}, token {i}: {token}, not {right}; its logprob is {apart} off"
            if token != right:
                break
    return ""


@pytest.mark.soak
@pytest.mark.also_gpu
@pytest.mark.parametrize("cell", [
    pytest.param(cell, id="-".join((cell.kind, cell.place, cell.across, cell.weights)), marks=pytest.mark.covers(
        kind=cell.kind, place=cell.place, across=cell.across, weights=cell.weights, feature=FEATURES))
    for cell in chosen("gpu" if where.DEVICE == "cuda" else "cpu")])
def test_what_is_combined_says_what_one_rank_says(cell: Cell, tmp_path: Path) -> None:
    kind, ends = KINDS[cell.kind], read(LAYOUTS[cell.across])[0]
    model, own = made(tmp_path, cell)
    selects = cell.place == "hosted" or kind.always
    options = {**pools(kind, cell.place, selects), **ROOM.get(cell.kind, {}), **own, "max_model_len": 512}
    alone = {**kind.options, **own, "kv_cache_memory_bytes": "4M", "kv_offloading_size": "0", "max_model_len": 512,
             **({**(kind.selects or {}), "host_decode": "off"} if selects else {})}
    with engines(model, tmp_path, ({},), **alone) as rank:
        rank.say(ASKED, logprobs=5)
        want = said(rank)
    bound = EXACT if cell.weights == "float32" and cell.kind != "fp8kv" else NEAR
    options |= {"kv_storage": f"file://{tmp_path}/store", "kv_storage_policy": "wait_complete"}
    with engines(model, tmp_path, ends, **options) as tried:
        for what in ("computed", "cached", "paused"):
            tried.say(ASKED, Paused if what == "paused" else None, logprobs=5)
            assert not (found := differs(said(tried), want, bound)), f"{what}: {found}"
        assert tried.asked.core.stats()["pauses"] >= 3
        reads = [chunk.kv_reads for chunk in tried.asked.ended.values() if chunk.kv_reads]
        assert any(one["hot_misses"] for one in reads) == (cell.place == "hosted")
        for _ in range(ATTEMPTS):           # storage may be slow, which costs hits
            tried.settle()
            for end in tried.ends:
                end.loop.handle(Flush())
            tried.say(ASKED, logprobs=5)
            assert not (found := differs(said(tried), want, bound)), f"stored: {found}"
            if tried.cached("disk"):
                return
        raise AssertionError("nothing was found in storage")


OTHERS = [("ordinary", "bfloat16"), ("ordinary", "int4"), ("fp8kv", "packed"),
          *((kind, weights) for kind in CONFIGS if indexed(kind) for weights in ("bfloat16", "int4"))]


@pytest.mark.soak
@pytest.mark.also_gpu
@pytest.mark.parametrize(("kind", "weights"), OTHERS)
def test_a_page_of_other_tokens_says_something_else(kind: str, weights: str, tmp_path: Path) -> None:
    """So what is alike has read all of its KV."""
    cell = chosen("cpu")[0]._replace(kind=kind, weights=weights)
    model, own = made(tmp_path, cell)
    options = {**KINDS[kind].options, **own, "kv_cache_memory_bytes": "4M", "kv_offloading_size": "0"}
    with engines(model, tmp_path, ({},), **options) as rank:
        rank.say(ASKED, logprobs=5)
        want = said(rank)
        rank.say(ASKED, logprobs=5)
        assert not differs(said(rank), want, NEAR)
        for page in range(4):
            first, end = 16 * page, 16 * page + 16
            rank.say([([*prompt[:first], *prompt[end:end + 16], *prompt[end:]], new) for prompt, new in ASKED],
                     logprobs=5)
            assert differs(said(rank), want, NEAR), page


@pytest.mark.soak
@pytest.mark.also_gpu
def test_codes_of_another_page_or_scale_say_something_else(tmp_path: Path) -> None:
    """Of a page of fp8 KV of one prompt that is another's, and of scales that are those of the token before."""
    model, own = made(tmp_path, chosen("cpu")[0]._replace(kind="fp8kv", weights="packed"))
    options = {**KINDS["fp8kv"].options, **own, "kv_cache_memory_bytes": "4M", "kv_offloading_size": "0"}
    with engines(model, tmp_path, ({},), **options) as rank:
        [worker] = rank.asked.built.executor._ranks
        pages_PLKCUW, table_RM = worker._hbm[0].pages, worker._tables.groups[0].device_RM
        for fault in ("none", "page 0", "page 1", "page 2", "page 3", "scales"):
            rank.asked.loop.handle(Flush())
            rank.say(ASKED, logprobs=5)
            want = said(rank)
            rank.settle()
            if fault.startswith("page"):
                both = table_RM[:2, int(fault[-1])].long()
                pages_PLKCUW[both] = pages_PLKCUW[both.flip(0)]
            elif fault == "scales":
                dim = CONFIGS["fp8kv"]["head_dim"]
                scale = slice(dim, dim + 4)
                pages_PLKCUW[..., 1:, scale] = pages_PLKCUW[..., :-1, scale].clone()
            if where.DEVICE == "cuda":
                torch.cuda.synchronize()
            rank.say(ASKED, logprobs=5)
            assert rank.cached("hbm") == sum((len(prompt) - 1) // 16 * 16 for prompt, _ in ASKED)
            assert bool(differs(said(rank), want, NEAR)) == (fault != "none"), fault
