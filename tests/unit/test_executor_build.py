"""Start-up: pool sizes and their refusals, and a tiny engine built from a config.json."""
from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pipeline_engine import gguf_checkpoint
from safetensors.torch import save_file

from penstock.config.base import machine
from penstock.config.base.errors import ConfigError
from penstock.config.request.params import SamplingParams
from penstock.config.request.selection import indexer_selection, selection_of
from penstock.config.settings.tree import (
    Config,
    DeviceConfig,
    KVConfig,
    ModelConfig,
    PairConfig,
    ScheduleConfig,
)
from penstock.core.core import Core
from penstock.core.plan import Arrived, RequestId, Token
from penstock.exec.load import weights
from penstock.exec.load.layout import caches_of
from penstock.exec.load.sizing import WORKSPACE_BYTES, size_pools
from penstock.exec.start import build
from penstock.exec.start.build import build_engine
from penstock.exec.step.links import split
from penstock.model.base import CacheShape
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import locate

FULL = CacheShape(name="full", layers=(0, 1), num_kv_heads=2, head_dim=8)
CACHES = caches_of((FULL,), 16, torch.float32)                                  # pages of 4,096 bytes
FREE = WORKSPACE_BYTES + 1_000_000
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 97,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 10000.0, "hidden_act": "silu",
}


def config(max_model_len=None, **kv) -> Config:
    return Config(model=ModelConfig(dtype="float32", model="x", max_model_len=max_model_len),
                  kv=KVConfig(**{"gpu_memory_utilization": 0.3} | kv),
                  schedule=ScheduleConfig(max_num_batched_tokens=512))


def test_a_gpu_has_large_steps_unless_launching_a_layer_takes_longer_than_its_arithmetic():
    def tokens(layer_bytes, given=None, **device):
        model = SimpleNamespace(stage=SimpleNamespace(first=2, end=6))
        raw = replace(config(), schedule=ScheduleConfig(max_num_batched_tokens=given), device=DeviceConfig(**device))
        return build._with_step(raw, SimpleNamespace(model=model,
                                                     bytes=4 * layer_bytes)).schedule.max_num_batched_tokens
    assert [tokens(n << 20) for n in (8, 35, 37, 380)] == [1024, 1024, 8192, 8192]
    assert tokens(8 << 20, given=77) == 77
    assert tokens(0, tp=2) == 8192              # several ranks' weights are not known here


def test_pools_take_what_they_are_given():
    core = size_pools(config(kv_cache_memory_bytes=4096 * 10 + 4095, kv_offloading_size="12288B"), CACHES, 512,
                      FREE).core
    assert (core.hbm_pages, core.dram_pages, core.page_size, core.max_len) == (10, 3, 16, 160)
    assert core.groups[0].page_bytes == CACHES.page_bytes == 4096


def test_without_a_size_a_share_of_what_the_host_tier_leaves_is_taken():
    core = size_pools(config(gpu_memory_utilization=0.5, kv_offloading_size="200000B"), CACHES, 512, FREE).core
    assert core.hbm_pages == 400_000 // 4096
    assert core.max_len == 512


def test_chunks_end_with_blocks_where_steps_and_intervals_of_states_have_whole_ones():
    def multiple(tokens, block=64, **kv):
        given = replace(config(**kv), schedule=ScheduleConfig(max_num_batched_tokens=tokens))
        return size_pools(given, CACHES, 512, FREE, block=block).core.chunk_multiple
    assert [multiple(n) for n in (32, 63, 64, 8192)] == [1, 1, 64, 64] and multiple(8192, block=1) == 1
    assert [multiple(8192, state_interval=n) for n in (48, 64, 96, 256)] == [1, 64, 1, 64]


@pytest.mark.parametrize(("changes", "hbm", "dram"), [
    (dict(), 300_000, 0), (dict(kv_offloading_size="auto"), 150_000, 500_000),
    (dict(kv_offloading_size="auto", kv_cache_memory_bytes=400_000), 400_000, 300_000),
    (dict(kv_offloading_size="100000B"), 270_000, 100_000),
    (dict(kv_offloading_size="2x", kv_cache_memory_bytes=300_000), 300_000, 600_000),
    (dict(kv_offloading_size="2x"), 187_500, 375_000),          # 0.3 of what the host tier leaves
    (dict(kv_offloading_size="1000x", gpu_memory_utilization=1.0, page_size=1), 999, 999_000)])
def test_the_host_tier_is_what_is_asked_for_or_half_of_what_is_free(changes, hbm, dram):
    caches = caches_of((FULL,), changes.get("page_size", 16), torch.float32)
    core = size_pools(config(**changes), caches, 512, FREE).core
    assert (core.hbm_pages, core.dram_pages) == (hbm // caches.page_bytes, dram // caches.page_bytes)


@pytest.mark.parametrize("changes", [
    dict(), dict(kv_offloading_size="auto"), dict(gpu_memory_utilization=1.0),
    dict(kv_offloading_size="2x", gpu_memory_utilization=1.0),
    dict(kv_offloading_size="auto", kv_cache_memory_bytes=400_000)])
def test_two_engines_of_one_server_take_no_more_than_is_free(changes):
    both = replace(config(**changes), pair=PairConfig(prefill_replicas=1, decode_replicas=1))
    free = 2 * FREE
    core = size_pools(both, CACHES, 512, free).core
    alone = size_pools(config(**changes), CACHES, 512, FREE).core
    assert (core.hbm_pages, core.dram_pages) == (alone.hbm_pages, alone.dram_pages)
    used = (core.hbm_pages + core.dram_pages) * CACHES.page_bytes
    assert 2 * (used + WORKSPACE_BYTES) <= free
    # The second one measures when the first has what it takes: what is named fits still.
    size_pools(both, CACHES, 512, free - used)


@pytest.mark.parametrize(("changes", "message"), [
    (dict(kv_cache_memory_bytes=1_000_001), r"--kv-cache-memory-bytes 1000001 and .* 0 bytes .* at most 1000000 bytes"),
    (dict(kv_cache_memory_bytes=600_000, kv_offloading_size="500000B"),
     r"--kv-offloading-size 500000B are 1\.0 MiB, but 257\.0"),
    (dict(kv_offloading_size="2000000B"), r"--kv-offloading-size 2000000B are"),
    (dict(kv_cache_memory_bytes=4095), r"--kv-cache-memory-bytes 4095 is less than one page: 16 tokens .* 4096 bytes"),
    (dict(gpu_memory_utilization=0.001), r"--gpu-memory-utilization 0\.001 .*less than one page"),
    (dict(kv_offloading_size="4095B"), r"--kv-offloading-size 4095B is less than one page"),
    (dict(kv_cache_memory_bytes=600_000, kv_offloading_size="1x"),
     r"--kv-offloading-size 1x, 600000 bytes, are 1\.1 MiB"),
    (dict(kv_cache_memory_bytes=20_000, kv_offloading_size="0.1x"),
     r"--kv-offloading-size 0\.1x, 2000 bytes, is less than one"),
    (dict(kv_cache_memory_bytes=999_000, kv_offloading_size="auto"),
     r"half of what that leaves free, 500 bytes .* less than one"),
    (dict(max_model_len=513), r"--max-model-len 513: this model's context is 512 tokens"),
    (dict(max_model_len=161, kv_cache_memory_bytes=40960),
     r"--max-model-len 161: .* 10 pages of 16 tokens, 160 in all; set --kv-cache-memory-bytes to at least "
     r"45056, or --max-model-len to at most 160"),
])
def test_what_does_not_fit_is_refused_with_the_numbers(changes, message):
    with pytest.raises(ConfigError, match=message):
        size_pools(config(**changes), CACHES, 512, FREE)


def test_the_numbers_in_a_refusal_are_the_limit():
    assert size_pools(config(kv_cache_memory_bytes=1_000_000), CACHES, 512, FREE).core.hbm_pages == 244
    assert size_pools(config(max_model_len=161, kv_cache_memory_bytes=45056), CACHES, 512, FREE).core.max_len == 161
    assert size_pools(config(max_model_len=160, kv_cache_memory_bytes=40960), CACHES, 512, FREE).core.max_len == 160


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def dummy(folder, **changes) -> Config:
    base = Config(model=ModelConfig(dtype="float32", model=str(folder), load_format="dummy", seed=3),
                  kv=KVConfig(kv_cache_memory_bytes=1 << 20, kv_offloading_size=f"{1 << 20}B"),
                  schedule=ScheduleConfig(max_num_seqs=2, max_num_batched_tokens=512),
                  device=DeviceConfig(device="cpu", threads=1))
    return replace(base, **changes)


def test_engines_that_keep_one_file_in_two_ways_are_no_pair(folder):
    """Their KV has one type, and is not the same KV."""
    asked = dummy(folder)
    loaded = weights.load(asked, None, lambda _: None)
    codes = replace(asked, model=replace(asked.model, dtype="gguf"))
    kept, other = (build.kv_identity(c, loaded, None, CACHES) for c in (asked, codes))
    assert {name for name in kept if kept[name] != other[name]} == {"weights kept as"}


def test_pages_of_engines_that_read_all_of_other_layers_are_no_others_pages(folder):
    """As many layers in each group, and not the same ones."""
    asked = dummy(folder)
    loaded = weights.load(asked, None, lambda _: None)
    selections = [selection_of(KVConfig(sparse_top_k=512, sparse_dense_layers=dense))
                  for dense in ((), (0,), (1,), (0, 1))]
    assert len({build.kv_identity(asked, loaded, one, CACHES)["selector"] for one in selections}) == 4


def test_bounds_have_the_type_that_is_asked_for_and_name_pages_by_it(folder):
    kv = KVConfig(kv_cache_memory_bytes=1 << 20, sparse_top_k=128, sparse_metadata_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match=r"--sparse-metadata-dtype fp8_e4m3: .* have 8 values to code"):
        build_engine(dummy(folder, kv=kv), str)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"head_dim": 16}))
    plain, coded = (build_engine(dummy(folder, kv=replace(kv, sparse_metadata_dtype=name)), str)
                    for name in ("auto", "fp8_e4m3"))
    assert plain.info["selector_bytes_per_token"] == 2 * 2 * 2 * 16 * 4 // 8     # layers, heads, bounds
    assert coded.info["selector_bytes_per_token"] == 2 * 2 * 2 * (16 + 4) // 8
    assert "bounds_dtype" not in plain.info and coded.info["bounds_dtype"] == "fp8_e4m3"
    asked = dummy(folder)
    loaded = weights.load(asked, None, lambda _: None)
    kept, other = (build.kv_identity(asked, loaded, None, one.caches) for one in (plain, coded))
    assert {name for name in other if other[name] != kept.get(name)} == {"pages: bounds_dtype"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_built_engine_produces_tokens(folder, dtype):
    lines: list[str] = []
    built = build_engine(dummy(folder, model=ModelConfig(
        model=str(folder), load_format="dummy", dtype=dtype)), lines.append)
    rid = RequestId(1)
    built.executor.open(rid, (5, 6, 7), SamplingParams(temperature=0.0))
    core, events, tokens = Core(built.core_config), [Arrived(rid, (5, 6, 7), 8)], []
    while events:
        advance = core.advance(events)
        tokens += [o.token for o in advance.outputs if isinstance(o, Token)]
        while advance.plan is not None:
            built.executor.submit(advance.plan)
            advance = core.advance(())
        events = list(built.executor.poll(block=True))
    assert len(tokens) == 8
    assert (built.vocab_size, built.max_model_len) == (97, 512)
    info = built.info
    assert info["dtype"] == dtype
    assert info["weight_bytes"] == (
        sum(w.numel() for _, w in weights.families.dummy_tensors(LLAMA, 0))
        * (4 if dtype == "float32" else 2))
    assert info["hbm_pages"] * info["page_bytes"] == info["hbm_bytes"] <= 1 << 20
    assert all(isinstance(v, str | int | float | bool) for v in info.values())
    [chosen] = [line for line in lines if line.startswith("back-ends: ")]
    assert all(f" {op} " in chosen for op in ("linear", "paged_attention"))


@pytest.mark.parametrize("rows", [4, 5])
def test_decoders_that_have_to_take_turns_are_announced_once(folder, rows):
    lines: list[str] = []
    build_engine(dummy(folder, schedule=ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=4)),
                 lines.append)
    warned = [line for line in lines if line.startswith("warning: --max-num-batched-tokens 4 is below")]
    assert len(warned) == (rows > 4)


def test_dummy_weights_follow_the_seed(folder):
    def logits(seed: int) -> torch.Tensor:
        loaded = build.load(dummy(folder, model=ModelConfig(dtype="float32",
            model=str(folder), load_format="dummy", seed=seed)), None, str)
        return loaded.model.logits(torch.ones(1, 32))

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_a_back_end_that_does_not_exist_is_a_config_error(folder):
    with pytest.raises(ConfigError, match=r"--backends linear=fast: .*fast"):
        build_engine(dummy(folder, device=DeviceConfig(device="cpu", threads=1,
                                                       backends=("linear=fast",))), str)


def test_a_named_back_end_is_used(folder):
    built = build_engine(dummy(folder, device=DeviceConfig(device="cpu",
        threads=1, backends=("linear=reference", "paged_attention=reference"))), str)
    assert "reference" in str(built.info["backend_linear"]).split("(")[0]
    assert "reference" in str(built.info["backend_paged_attention"]).split("(")[0]


def test_weights_that_cannot_fit_are_refused_before_they_are_read(folder):
    huge = dict(LLAMA, hidden_size=1 << 16, intermediate_size=1 << 18, num_hidden_layers=80,
                num_attention_heads=1 << 13)
    (folder / "config.json").write_text(json.dumps(huge))
    with pytest.raises(ConfigError, match=r"its weights take .* GiB as float32 and .* are free"):
        build_engine(dummy(folder), str)


def test_refusals_of_weights_and_pools_name_ulimit_where_it_leaves_less_than_the_machine(folder, monkeypatch):
    def refusals():
        for made in (lambda: size_pools(config(kv_cache_memory_bytes=1 << 50), CACHES, 512, FREE),
                     lambda: size_pools(config(), CACHES, 512, WORKSPACE_BYTES),
                     lambda: build_engine(dummy(folder), str)):
            with pytest.raises(ConfigError) as refused:
                made()
            yield "; ulimit -v 1000 lets each process have 0.00 GiB of addresses" in str(refused.value)

    huge = dict(LLAMA, hidden_size=1 << 16, intermediate_size=1 << 18, num_hidden_layers=80,
                num_attention_heads=1 << 13)
    (folder / "config.json").write_text(json.dumps(huge))
    assert not any(refusals())
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (1000 << 10, -1))
    assert all(refusals())


def test_a_stage_of_a_gguf_file_needs_memory_for_its_own_codes(tmp_path, monkeypatch):
    file = gguf_checkpoint(tmp_path / "tiny.gguf")
    asked = Config(model=ModelConfig(dtype="gguf", model=file), device=DeviceConfig(device="cpu", threads=1))
    stage = split([4, 2])[1]
    need = weights.weight_bytes(open_checkpoint(locate(file), ["u8"]), torch.float32, stage)
    free = [need]
    monkeypatch.setattr(weights.machine, "probe", lambda: SimpleNamespace(memory_available=free[0], limit=""))
    lines: list[str] = []
    loaded = weights.load(asked, stage, lines.append)
    assert loaded.bytes == need < Path(file).stat().st_size
    free[0] -= 1
    with pytest.raises(ConfigError, match=r"its weights take .* as codes and .*: take a smaller model$"):
        weights.load(asked, stage, lines.append)


def test_how_far_the_weights_are_is_told(folder, monkeypatch):
    monkeypatch.setattr(weights, "PROGRESS_S", 0.0)
    lines: list[str] = []
    weights.load(dummy(folder), None, lines.append)
    told = [line for line in lines if line.startswith("model: ") and " after " in line]
    assert len(told) == len(list(weights.families.tensor_shapes(LLAMA)))
    assert any(line.endswith("of weights to load") for line in lines)


@pytest.mark.parametrize(("block", "tokens"), [(4, 16), (12, 24), (32, 32)])
def test_a_page_holds_whole_blocks_of_a_model_that_selects_them(tmp_path, block, tokens):
    (tmp_path / "config.json").write_text(json.dumps({
        **LLAMA, "architectures": None, "model_type": "minimax_m3", "dense_intermediate_size": 48,
        "shared_intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4,
        "moe_layer_freq": [0, 1],
        "sparse_attention_config": {"sparse_attention_freq": [0, 1], "sparse_num_index_heads": 2,
                                    "sparse_index_dim": 8, "sparse_block_size": block, "sparse_topk_blocks": 4}}))
    layout = weights.load(dummy(tmp_path), None, str).layout
    assert {one.page_size for one in layout.caches.layouts} == {layout.caches.page_size} == {tokens}
    assert (layout.selection.budget, layout.selection.unit) == (4 * block, block)


def test_tensors_that_the_model_has_no_place_for_are_skipped_with_one_line(folder):
    """Layers after the last, modules outside of the model, old buffers and static scales."""
    made = dict(weights.families.dummy_tensors(LLAMA, 1))
    last = LLAMA["num_hidden_layers"]
    extra = {f"model.layers.{last}.mlp.up_proj.weight": 3, "model.layers.0.self_attn.rotary_emb.inv_freq": 2,
             "model.layers.0.self_attn.k_scale": 1, "score.weight": 4}
    save_file({**made, **{name: torch.ones(size) for name, size in extra.items()}},
              folder / "model.safetensors")
    lines: list[str] = []
    asked = dummy(folder, model=ModelConfig(dtype="float32", model=str(folder)))
    assert weights.load(asked, None, lines.append).bytes == 4 * sum(t.numel() for t in made.values())
    assert [line for line in lines if "not read" in line] == [
        "model: 4 tensors are not read: 2 buffers and static scales (model.layers.0.self_attn.k_scale, "
        "model.layers.0.self_attn.rotary_emb.inv_freq); 2 not of this model "
        f"(model.layers.{last}.mlp.up_proj.weight, score.weight)"]
    save_file({**made, "model.layers.0.mlp.up_proj.bias": torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"up_proj\.bias', which a model of this config\.json"):
        weights.load(asked, None, lines.append)


def test_the_largest_weight_needs_room_twice_while_it_is_loaded(folder, monkeypatch):
    """Or a model of a few layers with a large vocabulary is killed while it loads."""
    sizes = [math.prod(shape) for _, shape in weights.families.tensor_shapes(LLAMA)]
    half = dummy(folder, model=ModelConfig(model=str(folder), load_format="dummy", dtype="bfloat16"))
    need, here = 2 * sum(sizes) + 4 * max(sizes), weights.machine.probe()
    monkeypatch.setattr(weights.machine, "probe", lambda: replace(here, memory_available=need))
    assert weights.load(half, None, str).bytes == 2 * sum(sizes)
    monkeypatch.setattr(weights.machine, "probe", lambda: replace(here, memory_available=need - 1))
    with pytest.raises(ConfigError, match=r"its weights take .* more while they are loaded, and .* are free"):
        weights.load(half, None, str)


def test_memory_that_runs_out_before_pools_have_a_size_is_a_config_error(folder, monkeypatch):
    def full(*args, **more):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(build, "size_pools", full)
    with pytest.raises(ConfigError, match="to measure steps does not fit into what is left of the GPU's memory"):
        build_engine(dummy(folder), str)


def test_a_model_whose_logits_are_not_finite_never_becomes_ready(folder, monkeypatch):
    real = weights.families.dummy_tensors

    def damaged(config, seed, wants, **how):
        for name, tensor in real(config, seed, wants, **how):
            yield name, tensor * torch.inf if name.endswith("1.mlp.down_proj.weight") else tensor

    monkeypatch.setattr(weights.families, "dummy_tensors", damaged)
    with pytest.raises(ConfigError, match="logits are not finite"):
        build_engine(dummy(folder), str)


LATENT = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "vocab_size": 97,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "max_position_embeddings": 512, "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


@pytest.fixture
def latent(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    return tmp_path


@pytest.mark.parametrize("topk", [None, 4])
def test_a_model_that_chooses_its_tokens_is_built_with_two_groups(latent, topk):
    lines: list[str] = []
    built = build_engine(dummy(latent, kv=KVConfig(kv_cache_memory_bytes=1 << 20, sparse_top_k=topk)), lines.append)
    assert [group.name for group in built.core_config.groups] == ["latent", "index"]
    assert built.core_config.groups[1].selector and built.core_config.hot_pages == 2       # 4 and a page
    assert built.selection is not None and built.selection.native and built.selection.budget == 4
    assert "backend_index_select" in built.info and "backend_paged_attention" not in built.info


def test_a_model_that_drafts_is_built_with_two_groups_more_and_says_so(latent):
    def built(**schedule):
        kv = KVConfig(kv_cache_memory_bytes=1 << 20, kv_offloading_size=f"{1 << 20}B",
                      kv_storage=f"file://{latent / 'stored'}")
        return build_engine(dummy(latent, kv=kv, schedule=ScheduleConfig(max_num_batched_tokens=64, **schedule)), str)
    one, other = built(speculative_method="mtp", speculative_tokens=2), built()
    groups = one.core_config.groups
    assert [group.name for group in groups] == ["latent", "index", "draft", "draft_hidden"]
    assert groups[2].resident and groups[3].snapshot and groups[3].page_tokens == one.core_config.page_size
    assert one.core_config.draft_tokens == 2 and one.info["weight_bytes"] > other.info["weight_bytes"]
    assert one.identity.items() - other.identity.items() == {("drafter", "mtp")}
    assert one.core_config.store_root != other.core_config.store_root


@pytest.mark.parametrize(("given", "message"), [
    (dict(sparse_top_k=8), "--sparse-top-k 8: this model's indexer selects 4 tokens"),
    (dict(sparse_top_k=4, sparse_block_size=16), "--sparse-block-size 16: this model's indexer selects 4"),
    (dict(sparse_top_k=4, sparse_dense_layers=("0",)), "selects 4 tokens, 1 at a time: leave it out"),
    (dict(hot_buffer_tokens=3), r"--hot-buffer-tokens 3: .* this model reads 4 tokens: at least as many"),
    (dict(kv_cache_memory_bytes=9000),
     r"--kv-cache-memory-bytes 9000 is too little for one hot buffer: 2 pages of 16 tokens")])
def test_another_choice_than_the_models_own_is_refused(latent, given, message):
    with pytest.raises(ConfigError, match=message):
        build_engine(dummy(latent, kv=KVConfig(**{"kv_cache_memory_bytes": 1 << 20, **given})), str)


REAL = {**LATENT, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "first_k_dense_replace": 3, "num_attention_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8,
        "topk_group": 4, "max_position_embeddings": 163840}


def test_a_real_models_shape_is_refused_before_allocation_with_the_numbers(tmp_path):
    """DeepSeek-V3.2, 671 billion parameters: a second, and no memory."""
    (tmp_path / "config.json").write_text(json.dumps(REAL))
    with pytest.raises(ConfigError, match=r"its weights take 12\d\d\.\d GiB as bfloat16 and .* are free"):
        build_engine(dummy(tmp_path, model=ModelConfig(
            model=str(tmp_path), load_format="dummy", dtype="bfloat16")), str)


def test_the_least_device_memory_of_a_real_models_rows_is_named():
    """index_topk 2,048 and a page: 61 layers of 1,152 bytes a token; keys of 256 bytes stay on the device."""
    rows, keys = (CacheShape(name=name, layers=tuple(range(61)), num_kv_heads=1, head_dim=dim, planes=1,
                             selector=name == "index") for name, dim in (("latent", 576), ("index", 128)))
    caches = caches_of((rows, keys), 64, torch.bfloat16)
    sized = size_pools(config(page_size=64, kv_cache_memory_bytes=4 << 30, kv_offloading_size="64GiB"), caches, 163840,
                       1 << 40,
                       selection=indexer_selection(2048))
    assert sized.core.hot_pages == 33 and sized.core.max_len == 163840
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 104857600 is too little for one hot buffer: 33 "
                                          r"pages of 64 tokens for 2112 tokens, .* 1\d\d\.\d MiB"):
        size_pools(config(page_size=64, kv_cache_memory_bytes=100 << 20, kv_offloading_size="64GiB"), caches, 163840,
                   1 << 40,
                   selection=indexer_selection(2048))
