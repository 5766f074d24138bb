"""Which kernels an operation runs on a GPU, for which shapes: registered names and launches, without a GPU.

Launches are recorded instead of made: Triton's and Gluon's by the kernel's name, those of CUDA C++ with `C++`
before it. The launches expected on Hopper were recorded before the implementations had names of their own.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import registry
from penstock.kernels.attention.latent_attention import PagedContext
from penstock.kernels.attention.paged_attention import AttentionSpec, cuda, flash
from penstock.kernels.c import device
from penstock.kernels.choose import clusters
from penstock.kernels.choose.select import SelectRule
from penstock.kernels.gemm import linear
from penstock.kernels.gemm.experts import Clamped
from penstock.kernels.op import Unusable
from penstock.kernels.platform import KernelError, Platform
from penstock.kernels.triton import lazy
from penstock.kernels.types import fp8, hot
from penstock.kernels.types.packed import KINDS, Packed
from penstock.kernels.types.ragged import Ragged

pytest.importorskip("triton", reason="Triton is not installed here")
HOPPER, AMPERE = (Platform(device="cuda", features=(sm,), torch="0", gpu=sm) for sm in ("sm_90", "sm_80"))
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with Triton, NVRTC and the version of flash-attn-4 that was tried."""
    monkeypatch.setattr(lazy, "triton_version", lambda: "3")
    monkeypatch.setattr(cuda, "triton_version", lambda: "3")
    monkeypatch.setattr("penstock.kernels.c.build.triton_version", lambda: "3")
    monkeypatch.setattr(device, "version", lambda: "13.0")
    monkeypatch.setattr(flash.metadata, "version", lambda name: flash.VERSION)
    monkeypatch.setattr(flash, "_flash", flash._Flash())
    monkeypatch.setattr(flash._flash, "begin", lambda: None)
    monkeypatch.setattr(flash._flash, "tried", lambda kind: True)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that would run on Hopper, in order."""
    from triton.runtime.jit import JITFunction

    from penstock.kernels.attention.latent_attention import triton_latent
    names: list[str] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: names.append(self.fn.__name__))
    monkeypatch.setattr(device, "_found", lambda source, name, shared, **defines: lambda *args: (
        names.append(f"C++ {name}")))
    monkeypatch.setattr(triton_latent, "_in_gluon", lambda: True)
    clusters._launches.cache_clear()
    yield names
    clusters._launches.cache_clear()


def use(op: str, name: str) -> Any:
    return registry.OPS[op].use(name)


def test_names_chosen_on_a_hopper_gpu(installed: None) -> None:
    chosen = {op: choice.name for op, choice in registry.choose(HOPPER).items()}
    assert chosen == {
        "linear": "cuda", "paged_attention": "fa4", "layer": "triton", "write_kv": "triton", "select": "cuda",
        "resolve": "cuda", "gather": "triton", "sparse_attention": "triton", "chunk_attention": "fa4",
        "merge": "triton", "index_pair": "triton", "index_select": "cuda", "block_select": "cuda",
        "latent_attention": "gluon", "experts": "cuda", "draw": "triton", "mask": "triton", "scan": "blocks"}


# Of operations with kernels for Hopper alone, what another GPU runs.
OTHER = {"paged_attention": "triton", "chunk_attention": "torch", "select": "triton", "resolve": "triton",
         "index_select": "triton", "block_select": "triton", "latent_attention": "triton"}


def test_names_chosen_on_another_gpu_or_with_triton_alone(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = registry.choose(AMPERE)
    assert {op: chosen[op].name for op in OTHER} == OTHER and chosen["linear"].name == "triton"
    assert linear.kinds(AMPERE, "triton") == ("e2m1", "u4", "u8") and linear.kinds(HOPPER, "cuda") == KINDS
    assert dict(chosen["select"].skipped)["cuda"] == "compiled for sm_90a only"

    def missing() -> str:
        raise Unusable("NVRTC is not installed")
    monkeypatch.setattr(device, "version", missing)
    monkeypatch.setattr(flash.metadata, "version", lambda name: "4.0.0b1")
    chosen = registry.choose(HOPPER)
    assert {op: c.name for op, c in chosen.items() if op in OTHER} == OTHER | {"latent_attention": "gluon"}
    assert chosen["linear"].name == "triton"


@pytest.mark.parametrize("platform, given, name", [
    *((HOPPER, f"{op}=cuda", "triton") for op in ("layer", "draw", "mask", "gather", "write_kv")),
    (HOPPER, "scan=cuda", "blocks"), (HOPPER, "scan=triton", "triton"),
    (HOPPER, "paged_attention=cuda", "fa4"), (AMPERE, "paged_attention=cuda", "triton"),
    (HOPPER, "chunk_attention=cuda", "fa4"), (AMPERE, "chunk_attention=cuda", "torch"),
    (HOPPER, "latent_attention=cuda", "gluon"), (AMPERE, "latent_attention=cuda", "triton"),
    (HOPPER, "select=cuda", "cuda"), (HOPPER, "select=triton", "triton")])
def test_old_names_of_gpu_implementations(installed: None, platform: Platform, given: str, name: str) -> None:
    requested = dict([given.split("=")])
    [choice] = registry.choose(platform, requested, tuple(requested)).values()
    assert choice.name == name and choice.reason.endswith(", requested")


def test_old_names_that_cannot_be_met(installed: None) -> None:
    with pytest.raises(KernelError, match=r"^draw has no implementation 'c': use one of triton, reference$"):
        registry.choose(HOPPER, {"draw": "native"})
    cpu = Platform(device="cpu", features=(), torch="0")
    with pytest.raises(KernelError, match=r"^draw=triton cannot run here: runs on cuda, not on cpu; use one of ref"):
        registry.choose(cpu, {"draw": "cuda"}, ("draw",))


def index_select(name: str, queries: int, rows: int, tokens: int, kind: str) -> None:
    """Keys of 128 in pages of 64, of one page's memory."""
    pages = tokens // 64
    q = torch.zeros(queries, 32, 128).to({"fp8": E4M3, "bf16": BF16, "f32": F32}[kind])
    key = (torch.zeros(1, 64, fp8.width(128, 128), dtype=torch.uint8) if kind == "fp8" else
           torch.zeros(1, 64, 128, dtype=q.dtype))
    row = torch.zeros(queries, dtype=torch.int32)
    use("index_select", name)(q, torch.zeros(queries, 32), key, torch.zeros(rows, pages, dtype=torch.int32), row,
                              row, topk=2048)


CPP = ("C++ score_keys", "C++ choose_best")
TRITON = ("clear_bins", "score_keys", "mark_keys", "take_keys")


@pytest.mark.parametrize("shape, want", [
    ((1, 4, 8192, "fp8"), CPP), ((4, 4, 32768, "fp8"), CPP), ((8, 64, 8192, "bf16"), CPP),
    ((4, 4, 8192, "bf16"), ("score_keys", "C++ choose_best")),
    ((4, 4, 8192, "f32"), ("score_keys", "C++ choose_best")),
    ((64, 4, 8192, "fp8"), ("C++ score_prompt", "C++ choose_best")),
    ((64, 4, 8192, "bf16"), ("C++ score_prompt", "C++ choose_best")),
    ((96, 4, 65536, "fp8"), ("C++ score_prompt", "C++ choose_many", "C++ choose_best"))])
def test_kernels_of_index_select(launches: list[str], shape: tuple[Any, ...], want: tuple[str, ...]) -> None:
    index_select("cuda", *shape)
    assert tuple(launches) == want
    launches.clear()
    index_select("triton", *shape)
    assert tuple(launches) == TRITON
    launches.clear()
    index_select("cuda", *shape)                # after Triton alone, C++ is there as before
    assert tuple(launches) == want


def resolve(name: str, slots: int) -> None:
    heads, unit = 2, torch.zeros(1, 2, 64, dtype=torch.int32)
    state = hot.HotLayer(slot_RKM=unit, unit_RKS=unit[:, :, :slots].contiguous(),
                         stamp_RKS=unit[:, :, :slots].contiguous(),
                         page_RW=torch.zeros(1, slots // 4, dtype=torch.int32),
                         count_RKE=torch.zeros(1, heads, 4, dtype=torch.int64))
    table = torch.zeros(1, 16, dtype=torch.int32)
    use("resolve", name)(torch.zeros(1, heads, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), table, table,
                         state, torch.zeros(1, dtype=torch.int32), page_units=4)


def select(name: str, units: int) -> None:
    row = torch.zeros(1, dtype=torch.int32)
    use("select", name)(torch.zeros(1, 4, 128, dtype=BF16), torch.zeros(1, 2, 2, 8, 128, dtype=BF16),
                        torch.zeros(1, units // 8, dtype=torch.int32), row, row, row + 16,
                        rule=SelectRule(unit=8, sink=8, window=8), chosen=16)


def blocks(name: str, tokens: int) -> None:
    row = torch.zeros(1, dtype=torch.int32)
    use("block_select", name)(torch.zeros(1, 4, 128, dtype=BF16), torch.zeros(1, 128, 128, dtype=BF16),
                              torch.zeros(1, tokens // 128, dtype=torch.int32), row, row, block=128, topk=16, first=0,
                              last=1)


def latent(name: str, heads: int, dim: int, value: int, dtype: torch.dtype = BF16) -> None:
    use("latent_attention", name)(torch.zeros(2, heads, dim, dtype=dtype), torch.zeros(4, 64, dim, dtype=dtype),
                                  torch.zeros(2, 256, dtype=torch.int32), value_dim=value, scale=1.0)


def coded(name: str, heads: int, dtype: torch.dtype = BF16) -> None:
    """All of two rows' context in codes, of a table that is wider."""
    seen = PagedContext(torch.zeros(3, 64, dtype=torch.int32), *torch.ones(2, 2, dtype=torch.int32))
    use("latent_attention", name)(torch.zeros(2, heads, 576, dtype=dtype),
                                  torch.zeros(4, 64, fp8.width(576, 512), dtype=torch.uint8), seen, value_dim=512,
                                  scale=1.0)


def scaled(name: str, rows: int, cols: int, dtype: torch.dtype = BF16) -> None:
    weight = Packed(torch.zeros(64, 256).to(E4M3), torch.ones(1, 256 // cols), 64, cols)
    use("linear", name)(weight, None)(torch.zeros(rows, 256, dtype=dtype))


def four(name: str, inputs: int, cols: int) -> None:
    weight = Packed(torch.zeros(64, inputs // 2, dtype=torch.uint8), torch.ones(64, -(-inputs // cols)), 1, cols,
                    four="e2m1")
    use("linear", name)(weight, None)(torch.zeros(1, inputs, dtype=BF16))


def experts(name: str, tokens: int, dim: int, width: int) -> None:
    """Of two experts in MXFP4 each token visits one."""
    gate_up, down = (Packed(torch.zeros(2 * rows, cols // 2, dtype=torch.uint8), torch.ones(2 * rows, cols // 32), 1,
                            32, four="e2m1") for rows, cols in ((2 * width, dim), (dim, width)))
    use("experts", name).mlp(torch.zeros(tokens, dim, dtype=BF16), torch.zeros(tokens, 1, dtype=torch.int64),
                             torch.ones(tokens, 1), gate_up, down, 0, None, Clamped(alpha=1.7, limit=7.0))


@pytest.mark.parametrize("run, op, best, args, want, alone", [
    (resolve, "resolve", "cuda", (16,), ["clear_one", "C++ map_units"], ["clear_one", "resolve_units"]),
    (resolve, "resolve", "cuda", (0,), ["resolve_units"], ["resolve_units"]),
    (select, "select", "cuda", (64,), ["score_units", "C++ choose_best"], ["score_units", "choose_units"]),
    (blocks, "block_select", "cuda", (4096,), ["score_blocks", "C++ choose_best"], ["score_blocks", "choose_units"]),
    (latent, "latent_attention", "gluon", (64, 576, 512), ["attend_whole", "join_units"],
     ["attend_rows", "join_units"]),
    (latent, "latent_attention", "gluon", (16, 576, 512), ["attend_rows", "join_units"],
     ["attend_rows", "join_units"]),
    (latent, "latent_attention", "gluon", (64, 576, 512, F32), ["attend_rows", "join_units"],
     ["attend_rows", "join_units"]),
    (coded, "latent_attention", "gluon", (64,), ["attend_whole", "join_units"], ["attend_rows", "join_units"]),
    (coded, "latent_attention", "gluon", (16,), ["attend_rows", "join_units"], ["attend_rows", "join_units"]),
    (coded, "latent_attention", "gluon", (64, F32), ["attend_rows", "join_units"], ["attend_rows", "join_units"]),
    (scaled, "linear", "cuda", (8, 128), ["C++ packed_rows"], ["packed_rows"]),
    (scaled, "linear", "cuda", (17, 128), ["packed_rows"], ["packed_rows"]),
    (scaled, "linear", "cuda", (8, 128, F32), ["packed_rows"], ["packed_rows"]),
    (scaled, "linear", "cuda", (8, 16), ["packed_rows"], ["packed_rows"]),
    (four, "linear", "cuda", (2880, 32), ["C++ packed_rows"], ["packed_rows", "add_shares"]),
    (four, "linear", "cuda", (320, 128), ["C++ packed_rows"], ["packed_rows"]),
    (four, "linear", "cuda", (352, 32), ["packed_rows"], ["packed_rows"]),
    (experts, "experts", "cuda", (1, 2880, 2880), ["C++ packed_experts", "C++ packed_experts", "sum_visits"],
     ["experts_in", "experts_out", "sum_visits"]),
    (experts, "experts", "cuda", (1, 2880, 1440), ["experts_in", "experts_out", "sum_visits"],
     ["experts_in", "experts_out", "sum_visits"]),
    (experts, "experts", "cuda", (2, 2880, 2880), ["experts_in", "experts_out", "sum_visits"],
     ["experts_in", "experts_out", "sum_visits"])])
def test_kernels_of_other_operations(launches: list[str], run: Any, op: str, best: str, args: tuple[Any, ...],
                                     want: list[str], alone: list[str]) -> None:
    for name, launched in ((best, want), ("triton", alone), (best, want)):
        launches.clear()
        run(name, *args)
        assert launches == launched, name


@pytest.mark.parametrize("dtype, dim, wants", [
    (BF16, 64, ("flash-attn-4", "torch")), (BF16, 36, ("masked", "masked")), (F32, 64, ("masked", "masked"))])
def test_attention_of_prompts(installed: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dim: int,
                              wants: tuple[str, str]) -> None:
    for kind, name in (("_Paged", "flash-attn-4"), ("_Gathered", "torch"), ("_Masked", "masked")):
        monkeypatch.setattr(cuda, kind, lambda rows, layout, spec, name=name: lambda *args: name)
    monkeypatch.setattr(cuda, "compose", lambda parts, layout: parts[0][1])
    layout = Ragged((0, 4), (4,), (0,), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(4, dtype=torch.int64),
                    torch.zeros(4, dtype=torch.int64), 16)
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=dim, dtype=dtype, scale=1.0)
    assert registry.choose(HOPPER, ops=("paged_attention",))["paged_attention"].name == "fa4"
    assert tuple(use("paged_attention", name)(layout, spec)() for name in ("fa4", "triton")) == wants


def test_attention_of_chunks(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def by(name: str) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            ran.append(name)
            return q, torch.zeros(q.shape[:-1][::-1] if q.dim() == 3 else q.shape[:-1])
        return run
    monkeypatch.setattr(flash, "attend_run", by("flash-attn-4"))
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", by("torch"))
    assert registry.choose(HOPPER, ops=("chunk_attention",))["chunk_attention"].name == "fa4"
    q = torch.zeros(3, 2, 64, dtype=BF16)
    for name in ("fa4", "torch", "fa4"):
        use("chunk_attention", name)(q, q, q, causal=False, scale=1.0)
    assert ran == ["flash-attn-4", "torch", "flash-attn-4"]


def test_flash_attention_of_another_version_is_tried_as_before(installed: None,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """`triton` is chosen then because the version is not the one that was tried; a trial decides, as it did."""
    monkeypatch.setattr(flash.metadata, "version", lambda name: "4.0.0b1")
    assert registry.choose(HOPPER, ops=("paged_attention",))["paged_attention"].name == "triton"
    assert lazy.alone(flash.ready)(2, 2, 64, BF16)
    monkeypatch.setattr(flash.metadata, "version", lambda name: flash.VERSION)
    flash.check(HOPPER)
    assert not lazy.alone(flash.ready)(2, 2, 64, BF16) and flash.ready(2, 2, 64, BF16)
