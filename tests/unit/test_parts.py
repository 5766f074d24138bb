"""Which rank has what: every element of every weight and page of every family, for any number of TP ranks."""
from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_attend import Dense
from rank_threads import LLAMA, SCAN, STATES, Threads, packed, parts

from penstock.config.request.selection import selection_of
from penstock.config.settings.tree import Config, DeviceConfig, KVConfig, ModelConfig, NodesConfig
from penstock.core.plan import Group, Tier
from penstock.core.settings import CoreConfig
from penstock.exec.load.layout import caches_of
from penstock.exec.load.sizing import groups_of
from penstock.exec.pipeline.nodes import Write
from penstock.exec.pipeline.remote_node import NodeHost, NodePages
from penstock.exec.step.links import nodes_of
from penstock.kernels.gemm.experts import OP, ExpertOps
from penstock.kernels.types.packed import Packed, quantised
from penstock.memory.dram import DramPool
from penstock.model import registry
from penstock.model import scan as scans
from penstock.model.base import Stage
from penstock.model.parts import Cut, TpRank
from penstock.model.scan import StateSpec
from penstock.model.weights.formats.blocks import quantises
from penstock.model.weights.formats.reader import Format
from penstock.model.weights.formats.table import format_of
from penstock.model.weights.slots import Slots
from penstock.transfer.pages import PoolPages, Span

QWEN2 = {**LLAMA, "model_type": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2,
         "tie_word_embeddings": True}
QWEN3 = {**LLAMA, "model_type": "qwen3", "num_attention_heads": 9, "num_key_value_heads": 3}
MISTRAL = {**LLAMA, "model_type": "mistral", "num_attention_heads": 8, "num_key_value_heads": 8}
MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 9, "num_experts_per_tok": 2,
       "moe_intermediate_size": 24, "mlp_only_layers": [1]}
LATENT = {"model_type": "deepseek_v32", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": 4, "first_k_dense_replace": 2, "num_attention_heads": 9, "q_lora_rank": 24,
          "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
          "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4, "n_routed_experts": 8,
          "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1,
          "topk_group": 1, "attention_bias": True, "max_position_embeddings": 64, "rope_theta": 10000.0}
MINIMAX = {**LLAMA, "model_type": "minimax_m2", "head_dim": 8, "rotary_dim": 4, "intermediate_size": 40,
           "num_local_experts": 9, "num_experts_per_tok": 2}
MINIMAX_M3 = {**MINIMAX, "model_type": "minimax_m3", "dense_intermediate_size": 48, "shared_intermediate_size": 40,
              "moe_layer_freq": [0, 1, 1, 1], "sparse_attention_config": {
                  "sparse_attention_freq": [0, 1, 1, 1], "sparse_num_index_heads": LLAMA["num_key_value_heads"],
                  "sparse_index_dim": 8, "sparse_block_size": 16}}
GLM = {**LATENT, "model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full", "shared"]}
FAMILIES = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "qwen3_moe": MOE,
            "deepseek_v32": LATENT, "glm_moe_dsa": GLM, **STATES}
SUMMED = ("o_proj.bias", "down_proj.bias", "out_proj.bias")     # added by one TP rank, of all that have the columns
WHOLE = ("embed_tokens.weight", "norm.weight", "norm.bias", "mlp.gate.weight", "correction_bias",
         "_a_proj.weight", "_a_proj.bias", "_with_mqa.weight", "_with_mqa.bias",
         "index_k_proj.weight", "indexer.wq_b.weight", "indexer.wk.weight",
         "indexer.weights_proj.weight")

EXPERTS = OP.use("reference")


def kept_by(config: dict[str, Any], ranks: list[Stage]) -> dict[str, list[torch.Tensor]]:
    """Of each weight for each rank that has its layer or table a mask of what it keeps."""
    shapes, found = dict(registry.tensor_shapes(config)), {}
    for rank in ranks:
        mine: dict[str, list[tuple[Cut, ...]]] = {}
        for name, cuts in registry.cuts_of(config, rank):
            mine.setdefault(name, []).append(cuts)
        for name in {*mine, *(n for n in shapes if n.startswith(tuple(
                f"model.layers.{i}." for i in range(rank.first, rank.end))))}:
            mask = torch.zeros(shapes[name], dtype=torch.int64)
            for cuts in mine.get(name, ()):
                assert tuple(cut.of for cut in cuts) == shapes[name]
                mask[tuple(cut.range for cut in cuts)] += 1
            assert (mask <= 1).all(), name
            found.setdefault(name, []).append(mask)
    return found


def check_weights(config: dict[str, Any], pp: int, tp: int, ranges: int) -> None:
    tied = config.get("tie_word_embeddings", False)
    for name, masks in kept_by(config, parts(pp, tp, ranges)).items():
        count = sum(masks)
        if name.endswith(WHOLE) and ".mamba." not in name:
            times = (1 + (pp > 1)) if tied and "embed" in name else 1
            assert (count == tp * times).all(), name
        elif any(part in name for part in (".k_proj", ".v_proj", ".index_q_proj")):
            assert (count >= 1).all(), name
        elif ".mamba.in_proj." in name or ".mamba.conv1d." in name:         # queries and keys are on each
            assert ((count == 1) | (count == tp)).all(), name
            assert tp == 1 or (count == tp).sum() == 2 * 6 * math.prod(count.shape[1:]), name
        elif name.endswith(SUMMED):
            assert len(masks) == tp and masks[0].all() and not sum(masks[1:], torch.zeros(1)).any(), name
        else:
            assert (count == 1).all(), name
    assert len(kept_by(config, parts(pp, tp, ranges))) == len(dict(registry.tensor_shapes(config)))


def check_heads(config: dict[str, Any], tp: int) -> None:
    """A TP rank's KV heads are those of its query heads, in q, k, v and the columns of o alike."""
    num, groups, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    at = "model.layers.0.self_attn."
    for tp_rank in range(tp):
        mine = dict(registry.cuts_of(config, parts(1, tp)[tp_rank]))
        q, k, v, o = (mine[f"{at}{x}_proj.weight"] for x in "qkvo")
        heads = {row // dim for row in range(q[0].first, q[0].end)}
        assert heads == {col // dim for col in range(o[1].first, o[1].end)}
        assert {h // (num // groups) for h in heads} == {row // dim for row in range(k[0].first, k[0].end)}
        assert k[0] == v[0] and heads


def check_pages(config: dict[str, Any], pp: int, tp: int) -> None:
    """Each element of a host page is written by one rank, and seen by those that have its layer and head."""
    model = registry.build(config, dtype=torch.float32, linear=lambda w, b: F.silu)
    bounds = KVConfig(sparse_top_k=512, sparse_dense_layers=("1",))
    selection = None if model.selector else selection_of(bounds)
    groups = groups_of(model, selection)
    caches = caches_of(groups, 16, torch.float32)
    pages = 2 * caches.slabs.slab_pages[0]
    core = CoreConfig(page_size=16, rows=1, hbm_pages=pages, dram_pages=pages, groups=caches.groups,
                      max_len=16, group_base=1 << 20)
    for g, group in enumerate(groups):              # groups take turns with slabs: each in memory of its own
        seen, written = (torch.zeros(caches.host_bytes(core), dtype=torch.uint8) for _ in range(2))
        for rank in parts(pp, tp):
            for memory in (seen, written):
                pool = caches.stage(rank, groups).host_pools(core, memory)[g]
                if pool.layout.num_layers and (memory is seen or pool.writes):
                    pool.pages += 1
        assert (caches.host_pools(core, written)[g].pages == 1).all(), group.name
        for head in range(group.num_kv_heads):
            holders = sum(head in range(cut.first, cut.end) for cut in (
                TpRank(i, tp).kv_heads(group.num_kv_heads) for i in range(tp)))
            assert (caches.host_pools(core, seen)[g].pages[:, :, head] == holders).all(), (group.name, head)
            assert holders == 1 or tp > group.num_kv_heads


def check_nodes(config: dict[str, Any], pp: int, tp: int, num: int) -> None:
    """On each machine each element of what it has of a host page is written by one rank; together the
    machines have all, and their pages are read and written as whole ones."""
    model = registry.build(config, dtype=torch.float32, linear=lambda w, b: F.silu)
    groups = groups_of(model, None if model.selector else selection_of(
        KVConfig(sparse_top_k=512, sparse_dense_layers=("1",))))
    caches = caches_of(groups, 16, torch.float32)
    core = CoreConfig(page_size=16, rows=1, hbm_pages=caches.slabs.slab_pages[0], max_len=16,
                      dram_pages=caches.slabs.slab_pages[0], groups=caches.groups, group_base=1 << 20)
    device, ranks = DeviceConfig(pp=pp, tp=tp), parts(pp, tp)
    nodes = nodes_of(Config(model=ModelConfig(model="m"), device=device, nodes=NodesConfig(nnodes=num)))
    assert [i for node in nodes for i in node] == list(range(pp * tp)) and all(nodes)
    found, stages = [], set()
    for node in nodes:
        own = [caches.stage(ranks[i], groups, [ranks[j] for j in node]) for i in node]
        assert len({(one.host, one.origins) for one in own}) == 1
        memory = torch.zeros(own[0].host_bytes(core), dtype=torch.uint8)
        pools = [one.host_pools(core, memory) for one in own]
        found.append((own[0], pools))
        stages |= {(one.origins[g][0] + one.parts[g].layer, one.layouts[g].num_layers, g)
                   for one in own for g in range(len(groups))}
        for g in range(len(groups)):                    # groups take turns with slabs: zeroed before each
            memory.zero_()
            for mine in pools:
                if mine[g].writes and mine[g].layout.num_layers:
                    mine[g].pages.view(torch.int32).add_(1)
            whole = DramPool(own[0].parts[g].whole, mine[g].num_pages, memory=memory,
                             page_stride=own[0].host.page_stride(g))
            assert (whole.pages.view(torch.int32) == 1).all(), (g, node)
    for g, layout in enumerate(caches.layouts):
        each = [(None if not n else Here(PoolPages(pools)), own) for n, (own, pools) in enumerate(found)]
        pages, base = NodePages(caches, each, PoolPages(found[0][1])), g * core.group_base
        spans = [range(a, a + n) for a, n, of in sorted(stages) if n and of == g]
        host = NodeHost(layout, Group(g), pages, spans)
        data = memoryview(bytes(i * i % 251 for i in range(layout.page_bytes)))
        host.placed(base, data)
        assert host.bytes_of(base) == data


class Here:
    """`far.Node` over pools in this process."""

    def __init__(self, pages: PoolPages) -> None:
        self._pages = pages

    def ask(self, message: Any) -> bytes:
        asked = message(1)
        first, num = asked.layers
        at = (Tier(asked.tier), Group(asked.group), range(first, first + num),
              [Span(*span) for span in asked.spans])
        if isinstance(asked, Write):
            self._pages.write(*at, memoryview(asked.body), range(asked.heads[0], sum(asked.heads)))
            return b""
        whole = self._pages._pools[at[:2]][0][0].part.whole
        found = bytearray(num * asked.heads[1] * sum(span.units for span in at[3]) * whole.unit_bytes
                          // (whole.num_layers * whole.num_kv_heads))
        self._pages.read(*at, memoryview(found), range(asked.heads[0], sum(asked.heads)))
        return bytes(found)


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v32", "qwen3_next"])
@pytest.mark.parametrize("pp, tp, num", [
    (2, 1, 2), (3, 1, 2), (2, 2, 2), (1, 2, 2), (1, 3, 2), (2, 3, 4), (2, 2, 4), (4, 3, 3), (1, 5, 5)])
def test_each_machine_has_its_layers_and_heads_of_host_pages_once(family, pp, tp, num):
    check_nodes(FAMILIES[family], pp, tp, num)


@pytest.mark.parametrize("tp", range(1, 9))
@pytest.mark.parametrize("family", FAMILIES)
def test_each_element_of_weights_and_pages_is_where_it_should_be(family, tp):
    config = FAMILIES[family]
    for pp in range(1, 5):
        for ranges in {1, tp, 2 if tp % 2 == 0 else 1} if family in ("qwen3_moe", "deepseek_v32") else {1}:
            check_weights(config, pp, tp, ranges)
        check_pages(config, pp, tp)
    if "head_dim" in config and family not in STATES:
        check_heads(config, tp)


def test_two_writers_of_a_rectangle_are_seen(monkeypatch):
    monkeypatch.setattr(TpRank, "owns", lambda self, kv_heads: True)
    with pytest.raises(AssertionError, match="latent"):
        check_pages(LATENT, 1, 2)


@pytest.mark.parametrize("width, tp, block, want", [
    (136, 3, 32, [64, 64, 8]), (768, 4, 128, [256, 256, 128, 128]), (24, 3, 16, [8, 8, 8]),
    (3, 3, 16, [1, 1, 1])])
def test_columns_go_in_blocks_and_no_lane_has_none(width, tp, block, want):
    assert [TpRank(i, tp, block=block).columns(width).size for i in range(tp)] == want


def test_a_part_of_packed_weights_means_the_part():
    """Also where it begins inside of what shares a scale."""
    random = torch.Generator().manual_seed(0)
    codes = Packed(torch.randint(16, (12, 96), generator=random, dtype=torch.uint8),
                   torch.rand(12, 3, generator=random), 1, 32, torch.rand(12, 3, generator=random))
    scaled = quantised(torch.randn(300, 260, generator=random), 128, 128)
    for rows, columns in ((slice(2, 7), slice(32, 96)), (slice(0, 12), slice(16, 48)), (slice(3, 5), slice(7, 40))):
        for one in (codes, codes.compact()):
            assert one.part(rows, columns).floats().equal(one.floats()[rows, columns])
            assert one.part(rows, columns).finite()
    for rows, columns in ((slice(128, 300), slice(0, 128)), (slice(64, 130), slice(16, 260)),
                          (slice(3, 5), slice(0, 260))):
        assert scaled.part(rows, columns).floats().equal(scaled.floats()[rows, columns])
    whole = scaled.part(slice(128, 256), slice(128, 260))
    assert (whole.rows, whole.cols) == (128, 128)


# ---------------------------------------------------------------- TP ranks as threads
def logits(config: dict[str, Any], tp: int, ranges: int = 1, together: ExpertOps | None = None,
           form: Format | None = None) -> list[torch.Tensor]:
    """Of a chunk and then a token, by TP rank. together: as on a device, experts are one operation, and weights
    in fp8, or of this format, stay that."""
    tp_group, found, blocks = Threads(tp), [None] * tp, form or format_of(config, "")

    @torch.inference_mode()
    def run(stage: Stage) -> None:
        index = stage.tp_rank.index
        model = registry.build(config, dtype=torch.float32, stage=stage,
                               tp_group=tp_group.of(index) if tp > 1 else None, experts=together,
                               linear=packed, scan=SCAN)
        for name, tensor in registry.dummy_tensors(
                config, 7, model.wants, formats=lambda name: blocks if quantises(name) else None):
            model.load(name, replace(tensor, scale_RJ=tensor.scale_RJ * 8) if isinstance(tensor, Packed) else
                       tensor * (torch.linspace(0.5, 1.5, len(tensor)) if "norm" in name else 8))
        model.finish()
        attend, ids = Dense(model.reads, model.groups), torch.arange(12) * 3 % 61
        found[index] = torch.cat([
            model.logits(model.forward(ids[at], torch.arange(at.start, at.stop), attend))
            for at in (slice(0, 11), slice(11, 12))])

    threads = [threading.Thread(target=run, args=(stage,)) for stage in parts(1, tp, ranges)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found


def check_logits(config: dict[str, Any], tp: int, ranges: int = 1, together: ExpertOps | None = None,
                 form: Format | None = None) -> None:
    [want], found = logits(config, 1, form=form), logits(config, tp, ranges, together, form)
    assert all(one is not None and one.equal(found[0]) for one in found), "TP ranks differ"
    assert torch.allclose(found[0], want, atol=1e-4, rtol=1e-4), "not the model"


@pytest.mark.parametrize("tp", [2, 3, 5])
def test_ranks_norm_all_heads_of_minimax_together(tp):
    """Of 5 ranks several have the same KV head, whose squares count once."""
    check_logits(MINIMAX, tp)


@pytest.mark.parametrize("tp, ranges, together", [(2, 1, None), (3, 3, EXPERTS), (2, 2, None), (5, 1, EXPERTS)])
def test_ranks_of_minimax_m3_compute_what_the_model_does(tp, ranges, together):
    """Its experts and the shared one gate clamped inputs."""
    check_logits(MINIMAX_M3, tp, ranges, together)
    check_weights(MINIMAX_M3, 2, tp, ranges)


@pytest.mark.parametrize("tp", [2, 3, 5])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "deepseek_v32", *STATES])
def test_lanes_compute_what_the_model_does_and_the_same_on_each(family, tp):
    for ranges in {1, tp} if family in ("qwen3_moe", "deepseek_v32") else {1}:
        for together in (None, EXPERTS) if family in ("qwen3_moe", "deepseek_v32") else (None,):
            check_logits(FAMILIES[family], tp, ranges, together)


def in_fp8(family: str, cols: int, **more: object) -> dict[str, Any]:
    blocks = {"quant_method": "fp8", "weight_block_size": [64, cols]}
    return {**FAMILIES[family], "quantization_config": blocks,
            **({"v_head_dim": 16} if "v_head_dim" in FAMILIES[family] else {"head_dim": 16}), **more}


@pytest.mark.parametrize("cols", [16, 64])
@pytest.mark.parametrize("family, tp", [("llama", 2), ("llama", 3), ("qwen3", 2), ("qwen3_moe", 2),
                                        ("deepseek_v32", 2)])
def test_lanes_of_weights_in_fp8_compute_what_the_model_does(family, tp, cols):
    """Heads begin inside of blocks of 64, and columns of an MLP of 136 between them."""
    config = in_fp8(family, cols, **({"moe_intermediate_size": 48} if family != "llama" else {}))
    check_logits(config, tp, together=EXPERTS)
    if family != "deepseek_v32":
        down = "model.layers.1.mlp.down_proj.weight"
        for tp_rank in range(tp):
            assert dict(registry.cuts_of(config, parts(1, tp)[tp_rank]))[down][1].first % cols == 0


@pytest.mark.parametrize("family, ranges", [("llama", 1), ("qwen3_moe", 1), ("qwen3_moe", 2), ("deepseek_v32", 1)])
@pytest.mark.parametrize("form", [Format("u8", 1, 16, 4), Format("u8", 1, 48, 4), Format("e2m1", 1, 32, 4),
                                  Format("e4m3", 1, 1024), Format("e4m3", 1024, 1024)], ids=str)
def test_tp_ranks_of_packed_weights_compute_what_the_model_does(form: Format, family: str, ranges: int) -> None:
    """Groups that columns are cut inside of, and blocks as wide as the weight, or all of it."""
    shape = {"v_head_dim": 16} if family == "deepseek_v32" else {"head_dim": 16}
    more = {} if family == "llama" else {"moe_intermediate_size": 48}
    check_logits({**FAMILIES[family], **shape, **more}, 2, ranges, EXPERTS, form)


def test_a_part_is_floats_where_a_tp_rank_begins_inside_of_what_kernels_read() -> None:
    """Experts of 24 columns over three TP ranks go in eights."""
    def dequantised(family: str, cols: int, tp: int) -> list[int]:
        config, found = in_fp8(family, cols), []
        for stage in parts(1, tp):
            model = registry.build(config, dtype=torch.float32, linear=packed, stage=stage)
            for name, tensor in registry.dummy_tensors(config, 0, model.wants, formats=lambda name: (
                    Format("e4m3", cols, cols) if quantises(name) else None)):
                model.load(name, tensor)
            found.append(model.dequantised)
        return found

    assert dequantised("qwen3_moe", 16, 2) == [0, 0] == dequantised("qwen3_moe", 128, 2)
    assert dequantised("qwen3_moe", 128, 3) == [0, 0, 0]            # one block is as wide as the weight
    assert dequantised("qwen3_moe", 16, 3) == [0, 0, 0]             # one of eight columns is as wide as the part
    assert min(dequantised("llama", 24, 1)) > 0


def a_bias_on_each_lane(monkeypatch):
    real = Slots.linear

    def linear(self, *args, **more):
        tp_rank, self.tp_rank = self.tp_rank, replace(self.tp_rank, index=0)
        made = real(self, *args, **more)
        self.tp_rank = tp_rank
        return made
    monkeypatch.setattr(Slots, "linear", linear)


def heads_that_are_off_by_one(monkeypatch):
    real = TpRank.queries

    def queries(self, num, kv_heads):
        cut = real(self, num, kv_heads)
        return cut if self.index == 0 else cut._replace(first=cut.first - 1, end=cut.end - 1)
    monkeypatch.setattr(TpRank, "queries", queries)


def experts_visited_on_two_lanes(monkeypatch):
    real = TpRank.experts

    def experts(self, num):
        cut = real(self, num)
        return cut if self.index or self.size == 1 else cut._replace(end=cut.end + 1)
    monkeypatch.setattr(TpRank, "experts", experts)


def gates_of_the_other_ranks_heads(monkeypatch):
    real = StateSpec._rows

    def rows(self, files, wanted, parts, together):
        other = parts if parts.size == parts.of else parts._replace(
            first=parts.of - parts.end, end=parts.of - parts.first)
        return real(self, files, wanted, other if "z" in wanted else parts, together)
    monkeypatch.setattr(StateSpec, "_rows", rows)


def a_norm_of_the_ranks_own_heads(monkeypatch):
    real = scans.Scanned.__init__

    def made(self, *args):
        real(self, *args)
        self.tp_group = None
    monkeypatch.setattr(scans.Scanned, "__init__", made)


@pytest.mark.parametrize("fault, family", [
    (a_bias_on_each_lane, "llama"), (heads_that_are_off_by_one, "llama"),
    (experts_visited_on_two_lanes, "qwen3_moe"), (a_bias_on_each_lane, "bamba"),
    *((gates_of_the_other_ranks_heads, family) for family in STATES), (a_norm_of_the_ranks_own_heads, "bamba")],
    ids=lambda x: getattr(x, "__name__", x))
def test_a_fault_of_lanes_is_seen(monkeypatch, fault, family):
    fault(monkeypatch)
    for together in (None, EXPERTS) if family == "qwen3_moe" else (None,):
        with pytest.raises(AssertionError, match="not the model"):
            check_logits(FAMILIES[family], 2, 2 if family == "qwen3_moe" else 1, together)
