"""All layers of a decode step in one call: bit for bit what its kernels make one by one."""
from __future__ import annotations

import ctypes

import pytest
import torch

from penstock.kernels.attention import paged_attention
from penstock.kernels.attention.paged_attention import AttentionSpec
from penstock.kernels.attention.paged_attention.native import NativeDecodes
from penstock.kernels.fused import layer
from penstock.kernels.gemm.linear.panels import NATIVE
from penstock.kernels.op import Unusable, WrongResult
from penstock.kernels.platform import probe
from penstock.kernels.types.packed import Packed
from penstock.kernels.types.ragged import Ragged
from penstock.model import registry
from penstock.model.base import Boundary

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40, "hidden_size": 80,
    "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False, "attention_bias": True,
    "mlp_bias": True}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "mlp_bias": False,
         "attention_bias": False}
PAGE = 4
LAYOUTS = {                                         # contexts of rows, the last so many tokens are computed
    "one": ((130,), (1,)),
    "several": ((1, 7, 300, 33), (1, 1, 1, 1)),
    "few queries": ((5, 140), (3, 8)),
}


class OneByOne:
    """An `Attend` over pools of its own."""

    def __init__(self, layout: Ragged, spec: AttentionSpec, pages: torch.Tensor) -> None:
        self.layout, self.pages = layout, pages.clone()
        self.run = paged_attention.prepare(layout, spec, backend="c")

    def pools(self, i):
        return self.pages[:, i, :, 0], self.pages[:, i, :, 1]

    def __call__(self, i, q, kv, chosen=None, sinks_N=None):
        paged_attention.write_kv(kv[:, 0], kv[:, 1], *self.pools(i), self.layout.page_T, self.layout.offset_T)
        return self.run(q, *self.pools(i))


class AtOnce(OneByOne):
    def __call__(self, i, q, kv, chosen=None, sinks_N=None):
        raise AssertionError("layers were called one by one")

    def paged(self):
        addresses = [pool.data_ptr() for i in range(3) for pool in self.pools(i)]
        return self.run.paged((ctypes.c_void_p * 6)(*addresses), self.pools(0)[0], self.layout.page_T,
                              self.layout.offset_T)


def layout_of(contexts, counts) -> tuple[Ragged, torch.Tensor]:
    """Rows with pages in an order of their own, and the positions of their tokens."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    pages_RM = torch.randperm(len(contexts) * 80, dtype=torch.int32).view(len(contexts), 80)
    positions = torch.cat([torch.arange(c - n, c) for c, n in zip(contexts, counts, strict=True)])
    row = torch.arange(len(contexts)).repeat_interleave(torch.tensor(counts))
    return Ragged(tuple(starts), contexts, tuple(range(len(contexts))), pages_RM,
                  pages_RM[row, positions // PAGE].long(), positions % PAGE, PAGE), positions


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    for op in (NATIVE, layer.OP.get("c"), paged_attention.OP.get("c")):
        try:
            op.probe(probe())
        except WrongResult:
            raise
        except Unusable as why:
            pytest.skip(str(why))


def codes(weight_OI, bias_O):
    scale_OG, shift_OG = torch.randn(2, len(weight_OI), weight_OI.shape[1] // 16) / 50
    code_OI = torch.randint(0, 16, weight_OI.shape, dtype=torch.uint8)
    return NATIVE.codes(Packed(code_OI, scale_OG, 1, 16, shift_OG), bias_O)


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["biases", "normed heads"])
@pytest.mark.parametrize(("dtype", "linear"), [
    (torch.float32, NATIVE), (torch.bfloat16, NATIVE), (torch.float32, codes)],
    ids=["float32", "bfloat16", "codes"])
@pytest.mark.parametrize("rows", LAYOUTS)
@torch.inference_mode()
def test_a_step_is_the_same_bit_for_bit(config, dtype, linear, rows):
    torch.manual_seed(1)
    model = registry.build(config, dtype=dtype, linear=linear, ops=layer.OP.use("c"))
    for name, tensor in registry.dummy_tensors(config, 7):
        model.load(name, tensor)
    model.finish()
    layout, positions = layout_of(*LAYOUTS[rows])
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=16, dtype=dtype, scale=0.25)
    pages = torch.randn(layout.pages_RM.numel(), 3, 2, 2, PAGE, 16).to(dtype)
    one, all_ = OneByOne(layout, spec, pages), AtOnce(layout, spec, pages)
    h, delta = torch.randn(2, len(positions), 80).to(dtype)
    for before in (None, delta):                    # of a first stage, and of one behind another
        want = model.layers(Boundary(h.clone(), before), positions, one)
        got = model.layers(Boundary(h.clone(), before), positions, all_)
        assert got.h_TD.equal(want.h_TD) and got.delta_TD.equal(want.delta_TD)
        assert all_.pages.equal(one.pages) and not one.pages.equal(pages)
        assert got.delta_TD.isfinite().all()


def test_what_runs_elsewhere_is_not_stacked():
    one = [layer.LayerWeights(norm_in=torch.ones(2), norm_mlp=torch.ones(2), q_norm=None, k_norm=None,
                              **dict.fromkeys(("qkv", "out", "gate_up", "down"), torch.relu))]
    shape = {"heads": 1, "kv_heads": 1, "head_dim": 16, "eps": 1e-5}
    assert layer.stack(layer.OP.use("c"), one, **shape) is None
    assert layer.stack(layer.OP.use("reference"), [], **shape) is None


@torch.inference_mode()
def test_attention_that_does_not_build_is_not_asked_for(monkeypatch):
    """Another implementation of it runs then, and layers are called one by one."""
    def kernel():
        raise Unusable("cc took more than 60 s")

    monkeypatch.setattr(NativeDecodes, "kernel", staticmethod(kernel))
    model = registry.build(LLAMA, dtype=torch.float32, linear=NATIVE, ops=layer.OP.use("c"))
    for name, tensor in registry.dummy_tensors(LLAMA, 7):
        model.load(name, tensor)
    model.finish()
    x = model.layers(Boundary(torch.randn(2, 80), None), torch.arange(2), lambda i, q, *others, **more: q)
    assert x.delta_TD.isfinite().all()
