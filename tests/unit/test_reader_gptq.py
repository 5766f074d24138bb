"""AWQ, GPTQ v1 and v2, AutoRound: the order of values in a word, stored zero points, groups, and refusals."""
from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import packers
import pytest
import torch
from packers import read, refused, weight, written

from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import locate

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True}
V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}


def auto_round(packing: str) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "group_size": 8, "sym": True, "packing_format": packing}


CASES = {
    "awq": (AWQ, partial(packers.awq, group=8), (16, 24)),
    "awq, one group": ({**AWQ, "group_size": -1, "version": "GEMM"}, partial(packers.awq, group=20), (8, 20)),
    "gptq": (GPTQ, packers.gptq, (16, 24)),
    "gptq, asymmetric": ({**GPTQ, "sym": False}, partial(packers.gptq, symmetric=False), (8, 40)),
    "gptq, eight bits": ({**GPTQ, "bits": 8}, partial(packers.gptq, bits=8, symmetric=False), (4, 24)),
    "gptq, one module of other bits and groups": (
        {**GPTQ, "group_size": 32, "dynamic": {"+:a": {"bits": 8, "group_size": 4}}},
        partial(packers.gptq, group=4, bits=8), (4, 24)),
    "gptq v2": (V2, partial(packers.gptq, symmetric=False, less=0), (8, 24)),
    "gptq, the last group smaller": ({**GPTQ, "group_size": 16}, partial(packers.gptq, group=16), (8, 40)),
    "gptq, columns in order of activations": ({**GPTQ, "desc_act": True}, partial(
        packers.gptq, symmetric=False, order=torch.randperm(24, generator=torch.Generator().manual_seed(2))), (8, 24)),
    "auto-round as gptq": (auto_round("auto_round:auto_gptq"), packers.gptq, (8, 24)),
    "auto-round": (auto_round("auto_round"), partial(packers.gptq, symmetric=False, less=0), (8, 24)),
    "auto-round as gptq v2": (auto_round("auto_round:gptqmodel"), partial(packers.gptq, less=0), (8, 24)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_weight_equals_what_its_codes_mean(case: str, tmp_path: Path) -> None:
    given, packer, shape = CASES[case]
    packer = packer if isinstance(packer, partial) and "group" in packer.keywords else partial(packer, group=8)
    parts, twin = packer(weight(*shape))
    assert read(tmp_path, given, parts).equal(twin)


def test_a_word_of_awq_has_even_outputs_first(tmp_path: Path) -> None:
    """One word by hand: AutoAWQ packs outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on."""
    found = read(tmp_path, {**AWQ, "group_size": 1}, {
        "qweight": torch.tensor([[0x75316420]], dtype=torch.int32), "scales": torch.ones(1, 8).half(),
        "qzeros": torch.zeros(1, 1, dtype=torch.int32)})
    assert found.equal(torch.arange(8.0)[:, None])


@pytest.mark.parametrize("given, means", [(GPTQ, 16), (V2, 15)])
def test_a_zero_point_of_v1_is_one_more_than_is_stored_up_to_sixteen(given, means, tmp_path: Path) -> None:
    found = read(tmp_path, given, {
        "qweight": torch.tensor([[0x76543210]] * 8, dtype=torch.int32).T.contiguous(),
        "scales": torch.ones(1, 8).half(), "qzeros": torch.full((1, 1), -1, dtype=torch.int32)})
    assert found.equal((torch.arange(8.0) - means).expand(8, 8))


def test_experts_are_read_one_by_one_and_a_bias_as_it_is(tmp_path: Path) -> None:
    made = {f"m.experts.{i}.up_proj": packers.awq(weight(8, 8 + 8 * i), 8) for i in range(2)}
    tensors = {f"{name}.{part}": t for name, (parts, _) in made.items() for part, t in parts.items()}
    bias = torch.rand(8)
    written(tmp_path, AWQ, {**tensors, "m.experts.0.up_proj.bias": bias})
    checkpoint = open_checkpoint(locate(str(tmp_path)))
    found = dict(checkpoint.tensors())
    assert found.pop("m.experts.0.up_proj.bias").equal(bias)
    assert {name: t.equal(made[name.removesuffix(".weight")][1]) for name, t in found.items()} == {
        f"{name}.weight": True for name in made}
    assert [n for n, _ in checkpoint.tensors(lambda name: name == "m.experts.1.up_proj.weight")] == [
        "m.experts.1.up_proj.weight"]


AWQ_PARTS, GPTQ_PARTS = packers.awq(weight(16, 24), 8)[0], packers.gptq(weight(16, 24), 8)[0]
REFUSED = {
    "awq for another kernel": ({**AWQ, "version": "gemv"}, AWQ_PARTS, "version 'gemv'.*supported: gemm, 4 bits"),
    "awq without zero points": ({**AWQ, "zero_point": False}, AWQ_PARTS, "zero_point False"),
    "three bits": ({**GPTQ, "bits": 3}, GPTQ_PARTS, "'gptq' of 3 bits"),
    "gptq for another kernel": ({**GPTQ, "checkpoint_format": "marlin"}, GPTQ_PARTS, "'marlin'; supported: gptq, "),
    "auto-round for another kernel": (auto_round("auto_round:marlin"), GPTQ_PARTS, "auto_round:marlin"),
    "auto-round that does not say": ({"quant_method": "auto-round", "bits": 4}, GPTQ_PARTS, "packing_format None"),
    "experts in one tensor": (AWQ, {n: t[None] for n, t in AWQ_PARTS.items()}, "each expert in tensors of its own"),
    "no scales": (AWQ, {"qweight": AWQ_PARTS["qweight"], "qzeros": AWQ_PARTS["qzeros"]}, "holds its 'scales'"),
    "words of the other axis": (AWQ, {**AWQ_PARTS, "qweight": GPTQ_PARTS["qweight"]}, "qweight is I32 of shape"),
    "zero points not transposed": (GPTQ, {**GPTQ_PARTS, "qzeros": GPTQ_PARTS["qzeros"].T}, "zero points of 6 bits"),
    "groups of other sizes": (GPTQ, {**GPTQ_PARTS, "g_idx": GPTQ_PARTS["g_idx"][:7]},
                              r"expected I32 or I64 of \(24,\)"),
    "a word of no module": (GPTQ, {"words": GPTQ_PARTS["qweight"]}, "config.json says GPTQ, which has no such"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_before_a_weight_is(case: str, tmp_path: Path) -> None:
    refused(tmp_path, *REFUSED[case])


@pytest.mark.parametrize("form", ["awq", "int4 asymmetric"])
def test_a_packed_head_of_a_wrapper_is_a_head_of_its_own(form: str, tmp_path: Path) -> None:
    """The levels of such a config disagree about `tie_word_embeddings`: the names in the files decide."""
    given, packer = packers.FORMATS[form]
    parts = {f"lm_head.{part}": t for part, t in packer(weight(16, 24))[0].items()}
    text = {"model_type": "qwen3_5_text", "tie_word_embeddings": True}
    config = {"model_type": "qwen3_5", "text_config": text, "quantization_config": given}
    for tensors, tied in ((parts, False), ({"model.language_model.embed_tokens.weight": weight(16, 24)}, True)):
        written(tmp_path, given, tensors)
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert locate(str(tmp_path)).config["tie_word_embeddings"] is tied
