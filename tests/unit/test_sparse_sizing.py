"""What sparse decode takes of device and host, and what is refused, with the demo model's numbers."""
from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch

from penstock.config.base.errors import ConfigError
from penstock.config.request.selection import selection_of
from penstock.config.settings.tree import Config, DeviceConfig, KVConfig, ModelConfig, ScheduleConfig
from penstock.core.lifecycle import Place
from penstock.core.plan import Arrived, RequestId
from penstock.core.policy.capacity import fits, largest, needs
from penstock.core.settings import CoreConfig
from penstock.exec.load.layout import caches_of
from penstock.exec.load.sizing import WORKSPACE_BYTES, DeviceMemory, Sizes, groups_of, size_pools, table_bytes
from penstock.exec.step.links import split
from penstock.memory.hot import HotBuffers
from penstock.model.base import CacheShape, GlobalLayer, LocalLayer, Reads, Source, Stage

MIB, GIB = 1 << 20, 1 << 30
DEMO = KVConfig(sparse_top_k=512, kv_cache_memory_bytes=256 * MIB, kv_offloading_size=f"{4 * GIB}B")
TOKEN_BYTES = 30 * 3 * 64 * 2 * 4


@dataclass
class Shape:
    """What is read of a model: SmolLM2-135M's."""

    groups: tuple[CacheShape, ...] = (CacheShape(
        name="full", layers=tuple(map(LocalLayer, range(30))), num_kv_heads=3, head_dim=64),)
    kv_format: str = ""
    stage: Stage = Stage(GlobalLayer(0), GlobalLayer(30), embeds=True, heads=True)
    softcap: float = 0.0

    @property
    def reads(self) -> dict[LocalLayer, Reads]:
        return {layer: Reads(source=Source(layer), num_heads=9, scale=0.125, softcap=self.softcap)
                for group in self.groups for layer in group.layers}


def caches_for(kv: KVConfig, model=None, dtype=torch.float32):
    return caches_of(groups_of(model or Shape(), selection_of(kv)), kv.page_tokens(), dtype)


def sized(kv: KVConfig, *, max_model_len=None, free=16 * GIB, rows=16, pp=1) -> Sizes:
    config = Config(model=ModelConfig(model="demo", max_model_len=max_model_len), kv=kv,
                    schedule=ScheduleConfig(max_num_seqs=rows, max_num_batched_tokens=512), device=DeviceConfig(pp=pp))
    selection = selection_of(kv)
    caches = caches_for(kv)
    if pp > 1:
        caches = caches.stage(split([30 // pp] * pp)[0], groups_of(Shape(), selection))
    return size_pools(config, caches, 8192, free, selection=selection)


@pytest.mark.parametrize(("block", "tokens"), [(1, 16), (8, 16), (12, 24), (16, 16), (128, 128)])
def test_a_page_is_by_default_the_least_from_16_tokens_on_that_holds_whole_blocks(block, tokens):
    assert KVConfig().page_tokens(block) == tokens and KVConfig(page_size=64).page_tokens(block) == 64


@pytest.mark.parametrize("layers", [(1, 5), (0, 6), (3, 3), (6, 1)])
@pytest.mark.parametrize("window", [1, 16, 17, 512])
def test_a_window_counts_as_its_pages_and_one_as_in_the_core(layers, window):
    """(layers that see all, layers with a window): what is held is what the core can place, to the page."""
    full, windowed = layers
    all_layers = tuple(map(LocalLayer, range(full + windowed)))
    shapes = [CacheShape(name="full", layers=all_layers[:full], num_kv_heads=2, head_dim=32),
              CacheShape(name="window", layers=all_layers[full:], num_kv_heads=2, head_dim=32,
                         window=window)][not full:]
    caches = caches_of(shapes, 16, torch.bfloat16)
    for slabs in (2, 3, 7, 40, 100):
        core = CoreConfig(page_size=16, rows=4, hbm_pages=slabs * caches.slabs.slab_pages[0], max_len=1 << 16,
                          groups=caches.groups)
        pages = caches.context_pages(caches.nbytes(core.hbm_pages))
        assert largest(core, hosted=False) == min(1 << 16, 16 * pages), slabs
        assert caches.bytes_for(min(pages, 1 << 12)) <= caches.nbytes(core.hbm_pages)
    per = caches.slabs.slab_pages[0]
    assert caches.bytes_for(2000 * per) - caches.bytes_for(1000 * per) == (
        1000 * caches.slabs.slab_bytes if full else 0)


def test_selection_is_for_layers_that_see_all():
    """A window stays as it is, whatever is asked of its layer; where nothing is left, that is said."""
    all_layers = tuple(map(LocalLayer, range(4)))
    full = CacheShape(name="full", layers=all_layers[::2], num_kv_heads=2, head_dim=32)
    window = replace(full, name="window", layers=all_layers[1::2], window=20)
    kv = KVConfig(sparse_top_k=512, sparse_dense_layers=("0", "1"))
    groups = groups_of(Shape(groups=(full, window)), selection_of(kv))
    assert [(g.name, g.layers, g.window) for g in groups] == [
        ("full", (2,), 0), ("bounds", (2,), 0), ("dense", (0,), 0), ("window", (1, 3), 20)]
    for wrong, said in ((Shape(groups=(window,)), "sees its last 20 tokens"),
                        (Shape(groups=(replace(full, layers=all_layers[:1]), window)), "none is left"),
                        (Shape(softcap=50.0), "caps its")):
        with pytest.raises(ConfigError, match=said):
            groups_of(wrong, selection_of(kv))


def request(tokens: int, *, selects=True) -> Arrived:
    return Arrived(RequestId(1), (1,) * tokens, 1, selects=selects)


def test_the_demo_holds_six_hot_buffers_of_23_mib_and_20_000_tokens():
    sizes, caches = sized(DEMO), caches_for(DEMO)
    core = sizes.core
    assert caches.page_bytes == 16 * TOKEN_BYTES * 9 // 8           # selector state is 1/8 at unit 8
    assert [(g.name, g.page_bytes, g.slab_pages, g.hosted) for g in core.groups] == [
        ("full", 16 * TOKEN_BYTES, 1, True), ("bounds", 2 * TOKEN_BYTES, 8, False)]
    assert caches.slabs.unused(0) == caches.slabs.unused(1) == 0
    assert core.hot_pages == 33
    assert core.hot_pages * core.groups[0].page_bytes == pytest.approx(23.2 * MIB, rel=.01)
    assert not core.always_hosted and core.max_len == 8192
    assert core.hbm_pages * 16 == pytest.approx(5_800, rel=.04)     # what the device keeps without it
    assert core.hot_pages_max == 128                                # 4 times the budget
    assert 8 * MIB < sizes.table_bytes < 9 * MIB
    left = core.hbm_pages - 6 * core.hot_pages                      # slabs, of 8 pages of bounds each
    assert left * 8 * 16 == pytest.approx(20_000, rel=.03)
    device, host = needs(core, Place.HOST, 3200)
    assert 6 * (device[0] + -(-device[1] // 8)) <= core.hbm_pages < 7 * (device[0] + -(-device[1] // 8))
    assert 6 * host[0] <= core.dram_pages == 4 * GIB // (16 * TOKEN_BYTES)
    assert largest(core, True) == 8192
    assert largest(core, False) == 4_992    # its bounds count


def test_the_context_is_what_the_core_can_place():
    for kv in (DEMO, replace(DEMO, kv_cache_memory_bytes=40 * MIB), replace(DEMO, kv_offloading_size=f"{150 * MIB}B"),
               replace(DEMO, sparse_dense_layers=("0", "7")), replace(DEMO, host_decode="off"),
               replace(DEMO, kv_cache_memory_bytes=40 * MIB, sparse_dense_layers=("0", "7")),
               replace(DEMO, kv_offloading_size="0"), replace(DEMO, kv_cache_memory_bytes=30 * MIB, page_size=64,
                                                              sparse_block_size=16)):
        core = sized(kv).core
        wide = replace(core, max_len=1 << 16)
        longest = largest(wide, wide.sparse)
        assert core.max_len == min(8192, longest // kv.page_tokens() * kv.page_tokens()), kv
        assert any(fits(core, place, core.max_len) for place in (Place.HOST, Place.DEVICE))


def test_always_and_off():
    assert sized(replace(DEMO, host_decode="always")).core.always_hosted
    off = sized(replace(DEMO, host_decode="off"))
    assert (off.core.hot_pages, off.table_bytes, len(off.core.groups)) == (0, 0, 2)
    assert off.core.max_len == 5_168                               # 256 MiB of KV and bounds, in slabs


def test_nothing_changes_without_a_budget():
    core = sized(KVConfig(kv_cache_memory_bytes=256 * MIB, kv_offloading_size=f"{4 * GIB}B")).core
    assert (core.hot_pages, core.hbm_pages, core.max_len) == (0, 364, 5824)
    assert [g.name for g in core.groups] == ["full"] and not core.sparse


def test_the_host_tier_is_half_of_what_is_free_as_soon_as_something_may_be_hosted():
    kv = KVConfig(sparse_top_k=512, kv_cache_memory_bytes=256 * MIB)
    half = (16 * GIB - 256 * MIB - 256 * MIB) // 2 // (16 * TOKEN_BYTES)
    assert sized(kv).core.dram_pages == half
    assert sized(replace(kv, kv_offloading_size="4x")).core.dram_pages == GIB // (16 * TOKEN_BYTES)
    for none in (dict(host_decode="off"), dict(kv_offloading_size="0")):
        core = sized(replace(kv, **none)).core
        assert (core.dram_pages, core.hot_pages) == (0, 0)
    assert sized(KVConfig(kv_cache_memory_bytes=256 * MIB)).core.dram_pages == 0


def test_ranks_share_the_host_tier_and_divide_what_is_left():
    """What is free is measured once, by who starts them; each rank's device pool is its part of that."""
    kv = KVConfig(sparse_top_k=512, gpu_memory_utilization=0.3)
    caches = caches_for(kv)
    room = 16 * GIB - 2 * WORKSPACE_BYTES
    config = Config(model=ModelConfig(model="demo"), kv=kv, device=DeviceConfig(pp=2),
                    schedule=ScheduleConfig(max_num_batched_tokens=512))
    halves = caches.stage(split([15, 15])[0], groups_of(Shape(), selection_of(kv)))
    core = size_pools(config, halves, 8192, 16 * GIB, selection=selection_of(DEMO)).core
    assert core.dram_pages == room // 2 // (16 * TOKEN_BYTES)           # pages of all layers
    device = int((room - room // 2) * kv.gpu_memory_utilization) // 2
    assert device * .98 < halves.nbytes(core.hbm_pages) <= device
    assert 2 * halves.nbytes(core.hbm_pages) + halves.host_bytes(core) <= room


@pytest.mark.parametrize(("given", "least", "most"), [
    ({}, 33, 128), ({"sparse_top_k": 511}, 33, 126),               # 504 in units, and 16
    ({"hot_buffer_tokens": 1000}, 33, 63), ({"hot_buffer_tokens": 512}, 32, 32)])
def test_hot_buffers_are_budget_and_one_page_and_grow_to_what_is_asked_for(given, least, most):
    core = sized(replace(DEMO, **given)).core
    assert (core.hot_pages, core.hot_pages_max) == (least, most)


@pytest.mark.parametrize(("gpu", "positions"), [
    (None, 16), (DeviceMemory(total=80 * GIB, free=70 * GIB, workspace=GIB), 32)])
def test_the_core_knows_how_many_positions_a_step_with_drafts_has(gpu, positions):
    for drafts, found in ({}, 0), ({"speculative_method": "ngram", "speculative_tokens": 5}, positions):
        config = Config(model=ModelConfig(model="demo"), kv=replace(DEMO, gpu_memory_utilization=0.9),
                        schedule=ScheduleConfig(max_num_batched_tokens=512, **drafts))
        core = size_pools(config, caches_for(DEMO), 8192, 16 * GIB, selection=selection_of(DEMO), gpu=gpu).core
        assert core.draft_positions == found and core.hot_pages_max == (192 if drafts else 128)


def test_dense_layers_are_a_group_that_stays_on_the_device():
    kv = replace(DEMO, sparse_dense_layers=("0", "29"))
    core, caches = sized(kv).core, caches_for(kv)
    assert [(g.name, layout.num_layers, g.hosted, g.selector, g.resident) for g, layout in zip(
        core.groups, caches.layouts, strict=True)] == [
            ("full", 28, True, False, False), ("bounds", 28, False, True, False),
            ("dense", 2, False, False, True)]
    assert groups_of(Shape(), selection_of(kv))[2].layers == (0, 29)
    assert caches.slabs.slab_pages == (1, 8, 14)
    later = Shape(stage=Stage(GlobalLayer(20), GlobalLayer(30), embeds=False, heads=True),
                  groups=(replace(Shape().groups[0], layers=tuple(map(LocalLayer, range(10)))),))
    assert [g.layers for g in groups_of(later, selection_of(kv))] == [
        tuple(range(9)), tuple(range(9)), (9,)]                    # of a stage: by its own numbers


def test_tables_are_what_a_row_may_need():
    caches = caches_for(DEMO)
    one = table_bytes(caches, 1, 8192, 33, selection_of(DEMO))
    assert one == 4 + 2 * 2 * 4 * 512 + 4 * 33 + 30 * 3 * (4 * 1024 + 8 * 66 + 32)
    assert table_bytes(caches, 16, 8192, 33, selection_of(DEMO)) == 16 * (one - 4) + 4


@pytest.mark.parametrize("layers", [(2, 28), (15, 15), (29, 1)])
def test_pools_and_tables_fill_the_memory_of_the_stage_with_most_of_both(layers):
    """The first stage has the widest slabs, for the layer that reads all, and few layers that select or many."""
    kv = replace(DEMO, sparse_dense_layers=("0",))
    config = Config(model=ModelConfig(model="demo"), kv=kv, device=DeviceConfig(pp=2),
                    schedule=ScheduleConfig(max_num_seqs=64, max_num_batched_tokens=512))
    selection, caches = selection_of(kv), caches_for(kv)
    stages = [caches.stage(stage, groups_of(Shape(), selection)) for stage in split(layers)]
    widest = max(stages, key=lambda one: one.slabs.slab_bytes)
    assert widest is stages[0]
    core = size_pools(config, widest, 8192, 16 * GIB, selection=selection, stages=stages).core
    tables = [table_bytes(one, core.rows, core.max_len, core.largest_hot, selection) for one in stages]
    taken = [one.nbytes(core.hbm_pages) + of_stage for one, of_stage in zip(stages, tables, strict=True)]
    assert max(taken) <= DEMO.kv_cache_memory_bytes
    assert max(n + one.slabs.slab_bytes for n, one in zip(taken, stages, strict=True)) > DEMO.kv_cache_memory_bytes


@pytest.mark.parametrize(("kv", "said"), [
    (dict(kv_cache_memory_bytes=24 * MIB),
     r"--kv-cache-memory-bytes 25165824 is too little for one hot buffer: 33 pages of 16 "
     r"tokens for 528 tokens, .* are 23\.9 MiB, tables .*; raise --kv-cache-memory-bytes to at least \d+, or lower"),
    (dict(kv_offloading_size=f"{20 * MIB}B"),
     r"host tier of 28 pages holds 448 tokens, less than one hot buffer of 528: "
     r"set --kv-offloading-size to at least 24330240B, or to 0"),
])
def test_what_does_not_fit_is_refused_with_the_numbers(kv, said):
    with pytest.raises(ConfigError, match=said):
        sized(replace(DEMO, **kv))


def test_the_number_in_the_refusal_is_the_limit():
    with pytest.raises(ConfigError) as e:
        sized(replace(DEMO, kv_cache_memory_bytes=24 * MIB))
    least = int(str(e.value).split("to at least ")[1].split(",")[0])
    assert sized(replace(DEMO, kv_cache_memory_bytes=least)).core.hot_pages == 33
    with pytest.raises(ConfigError, match="too little"):
        sized(replace(DEMO, kv_cache_memory_bytes=least - 1))
    assert sized(replace(DEMO, kv_offloading_size=f"{24330240}B")).core.dram_pages == 33


def at_least(**asked) -> int:
    """The number that a refusal of `asked` says to type."""
    with pytest.raises(ConfigError) as e:
        sized(**asked)
    return int(re.search(r"to at least (\d+)", str(e.value))[1])


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("changes", [dict(kv_offloading_size=f"{20 * MIB}B"), dict(kv_offloading_size="0.04x")])
def test_the_number_in_a_refusal_of_a_host_tier_is_the_limit(changes, pp):
    """It is one for all stages, whose device pools have parts of its pages."""
    kv = replace(DEMO, **changes)
    least = at_least(kv=kv, pp=pp)
    assert sized(replace(kv, kv_offloading_size=f"{least}B"), pp=pp).core.dram_pages == 33
    with pytest.raises(ConfigError, match="less than one hot buffer"):
        sized(replace(kv, kv_offloading_size=f"{least - 1}B"), pp=pp)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("kv", [replace(DEMO, kv_cache_memory_bytes=60 * MIB, kv_offloading_size=f"{100 * MIB}B"),
                                KVConfig(kv_cache_memory_bytes=60 * MIB)])
def test_the_number_in_a_refusal_of_a_context_is_the_limit(kv, pp):
    least = at_least(kv=kv, max_model_len=8192, pp=pp)
    assert sized(replace(kv, kv_cache_memory_bytes=least), max_model_len=8192, pp=pp).core.max_len == 8192
    with pytest.raises(ConfigError, match="to at least"):
        sized(replace(kv, kv_cache_memory_bytes=least - 1), max_model_len=8192, pp=pp)


def test_tables_are_those_that_the_device_makes():
    hot = HotBuffers(layers=30, rows=16, kv_heads=3, pages=512, hot_pages=33, page_units=2)
    assert table_bytes(caches_for(DEMO), 16, 8192, 33, selection_of(DEMO)) == hot.nbytes + 16 * 2 * 2 * 4 * 512


def test_no_table_is_made_where_nothing_is_hosted():
    hot = HotBuffers(layers=30, rows=16, kv_heads=3, pages=512, hot_pages=0, page_units=2)
    assert hot.nbytes == 30 * 16 * 3 * 4 * 8 + 4                  # counts, and the step
    hot.bind(3, [], [])


def on_a_gpu(kv: KVConfig, workspace=2 * GIB, free=100 * GIB, ranks=1) -> Sizes:
    config = Config(model=ModelConfig(model="demo"), kv=kv, schedule=ScheduleConfig(max_num_batched_tokens=512))
    return size_pools(config, caches_for(kv), 8192, 16 * GIB,
                      gpu=DeviceMemory(total=140 * GIB, free=free, workspace=workspace, ranks=ranks))


def test_a_gpu_has_memory_of_its_own():
    """The share is of all of it: weights, what others use, and the largest step come off."""
    page = 16 * TOKEN_BYTES
    core = on_a_gpu(KVConfig(gpu_memory_utilization=0.9)).core
    assert core.hbm_pages == int((100 - 2 - 14) * GIB) // page and core.dram_pages == 0
    core = on_a_gpu(KVConfig(kv_cache_memory_bytes=90 * GIB, kv_offloading_size=f"{15 * GIB}B")).core
    assert (core.hbm_pages, core.dram_pages) == (90 * GIB // page, 15 * GIB // page)
    assert on_a_gpu(KVConfig(gpu_memory_utilization=0.9, kv_offloading_size="auto")).core.dram_pages == (
        (16 * GIB - 256 * MIB) // 2 // page)
    for kv, words in ((KVConfig(kv_cache_memory_bytes=99 * GIB),
                       f"--kv-cache-memory-bytes {99 * GIB} does not fit: .* of 140.0 GiB"
                       f".* at most {98 * GIB} bytes are left; .* give at most that"),
                      (KVConfig(gpu_memory_utilization=0.2), "--gpu-memory-utilization 0.2 leaves 0 bytes .*"
                       "step of --max-num-batched-tokens 512 and --max-num-seqs 16 2048.0 MiB: at most"),
                      (KVConfig(kv_cache_memory_bytes=GIB, kv_offloading_size=f"{17 * GIB}B"),
                       "--kv-offloading-size .* of memory .* host")):
        with pytest.raises(ConfigError, match=words):
            on_a_gpu(kv)
    with pytest.raises(ConfigError, match="at most 0 bytes are left"):
        on_a_gpu(KVConfig(gpu_memory_utilization=0.9), workspace=101 * GIB)


def test_ranks_on_one_gpu_have_the_same_share_of_what_is_left():
    page = 16 * TOKEN_BYTES
    core = on_a_gpu(KVConfig(gpu_memory_utilization=0.9), ranks=2).core
    assert core.hbm_pages == int((100 - 2 - 14) * GIB) // 2 // page
    with pytest.raises(ConfigError, match=f"does not fit for each of 2 ranks: .* at most {49 * GIB} bytes"):
        on_a_gpu(KVConfig(kv_cache_memory_bytes=50 * GIB), ranks=2)
