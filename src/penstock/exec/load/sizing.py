"""How large the pools become, from the flags, the model and the memory that is free.

Owns every number that depends on both. What is asked for and does not fit is refused here, with the
numbers and the flag to change.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from penstock.config.base.errors import ConfigError
from penstock.config.base.machine import probe
from penstock.config.request.selection import Selection
from penstock.config.settings.tree import Config, KVConfig
from penstock.core.settings import CoreConfig
from penstock.exec.drafts.narrow import WIDE
from penstock.exec.load.backends import selection_for
from penstock.exec.load.layout import Caches, caches_of
from penstock.kernels.types import fp8
from penstock.memory.copying import SPLIT_BYTES
from penstock.memory.slabs import Slabs
from penstock.model.base import CacheShape, LocalLayer, Model, value_dim_of

# Left for activations, logits and the allocator when pools are sized: a step of 512 tokens of a
# model of 1.5 B parameters needs about half of it.
WORKSPACE_BYTES = 256 << 20
# Of a prompt at a pair's prefill engine the last chunk on a GPU. When it ends, its bytes and those of the one
# before are left to send: of 32k tokens 3 %. A CPU takes longer for a chunk than for sending it.
LAST_TOKENS = 512
# A row of which at most so many bytes are still being loaded starts, and its step waits for them: a device's
# layer by layer, on a CPU all others wait too, for a few milliseconds a row.
WAIT_BYTES = {True: SPLIT_BYTES, False: 32 << 20}
# A hot buffer grows to so many times what a position selects, and to what all of a row with drafts do: what
# more hits is not worth it.
HOT_BUDGETS = 4
STORED_PAGES = 1 << 16      # that the core remembers, of what storage has: about 1 KB each


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Of a GPU, in bytes: all of it, what is free with the weights loaded, and what of that the largest step
    takes beside weights and KV, as measured; and how many ranks it has."""

    total: int
    free: int
    workspace: int
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """`table_bytes`: of the device's memory, what page tables and the state of hot buffers take."""

    core: CoreConfig
    table_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """One machine: bytes of its memory that are free with the weights loaded, how many ranks it has, and the
    slabs of its host pool."""

    free: int
    ranks: int
    host: Slabs


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What a model keeps of requests: what these select of it, its cache groups, and these as memory."""

    selection: Selection | None
    groups: tuple[CacheShape, ...]
    caches: Caches


def kv_layout(config: Config, model: Model, dtype: torch.dtype, *, selects: bool = True) -> KvLayout:
    """selects: False: as if --sparse-top-k were not given. Raises ConfigError as `groups_of` does."""
    selection = selection_for(config, model)
    if not selects and selection is not None and not selection.native:
        selection = None
    kv = replace(config.kv, page_size=config.kv.page_tokens(1 if selection is None else selection.unit))
    groups = groups_of(model, selection, kv)
    return KvLayout(selection, groups, caches_of(groups, kv.page_tokens(), dtype))


def groups_of(model: Model, selection: Selection | None,
              kv: KVConfig | None = None) -> tuple[CacheShape, ...]:
    """The model's cache groups, in the formats that `kv` names, with what a selection adds: bounds of the
    keys of each unit, on the device, and dense layers in a group of their own, which stays there too, as
    windows and states do, and so does what drafts. Raises ConfigError for a format that this model's vectors
    cannot have, and where nothing is to be selected."""
    kv = kv or KVConfig()
    kept = [replace(group, keep=kv.window_interval if group.window else 0) for group in model.groups]
    own = tuple(replace(group, page_tokens=kv.state_interval or 0) if group.snapshot else group
                for group in kept if not group.drafts)
    drafts = tuple(replace(group, page_tokens=kv.page_tokens()) if group.snapshot else group
                   for group in kept if group.drafts)
    return (*_selected(model, selection, kv, own), *drafts)


def _selected(model: Model, selection: Selection | None, kv: KVConfig,
              own: tuple[CacheShape, ...]) -> tuple[CacheShape, ...]:
    """As `groups_of`, of what does not draft."""
    dtype = kv_format(model, kv)
    value_dim, index = value_dim_of(model), dtype if kv.sparse_metadata_dtype == "auto" else kv.sparse_metadata_dtype
    kept = tuple(_kept(group, index, group.head_dim, "--sparse-metadata-dtype") if group.selector else
                 _kept(group, dtype, value_dim, "--kv-cache-dtype") if value_dim else
                 _kept_heads(group, dtype, model) for group in own)
    if selection is None or selection.native:
        return kept
    (full, *_), (of_pages, *windows) = own, kept
    if full.window:
        raise ConfigError(f"--sparse-top-k: every layer of this model sees its last {full.window} tokens "
                          "only, and keeps no more: leave the flag out")
    if any(reads.softcap for reads in model.reads.values()):
        raise ConfigError("--sparse-top-k: this model caps its scores (attn_logit_softcapping), and what "
                          "selects does not: leave the flag out")
    first = model.stage.first
    dense = tuple(LocalLayer(i - first) for i in selection.dense if i - first in full.layers)
    rest = tuple(i for i in full.layers if i not in dense)
    if full.layers and not rest:
        raise ConfigError("--sparse-dense-layers: of this model's layers that see all none is left to select "
                          "in: name fewer, or leave --sparse-top-k out")
    bounds = replace(full, name="bounds", layers=rest, unit=selection.unit, selector=True)
    groups = [replace(of_pages, layers=rest),
              _kept(bounds, kv.sparse_metadata_dtype, full.head_dim, "--sparse-metadata-dtype")]
    if dense:
        groups.append(replace(of_pages, name="dense", layers=dense, resident=True))
    return (*groups, *windows)


def kv_format(model: Model, kv: KVConfig) -> str:
    """Return the format of a KV cache: --kv-cache-dtype, or for `auto` fp8 where the checkpoint asks for it and this
    model can have it, see `why_not_fp8`."""
    asks = kv.kv_cache_dtype == "auto" and model.kv_format == "fp8_e4m3"
    return "fp8_e4m3" if asks and not why_not_fp8(model, kv) else kv.kv_cache_dtype


def why_not_fp8(model: Model, kv: KVConfig) -> str:
    """Return why `auto` is not fp8 although the checkpoint asks for it, for the log; "": it is."""
    value_dim = value_dim_of(model)
    for shape in model.groups:
        follows = not shape.selector or kv.sparse_metadata_dtype == "auto"
        coded = value_dim if value_dim and not shape.selector else shape.head_dim
        if not (shape.snapshot or shape.drafts) and follows and not _is_codable(shape, coded):
            return f"as its {shape.name} vectors have {coded} values, and fp8 is for {_codable(shape)}"
    if any(reads.dtype != torch.bfloat16 for reads in model.reads.values()):
        return "as float32 is computed in: --kv-cache-dtype fp8 makes it fp8"
    return ""


def _is_codable(shape: CacheShape, coded: int) -> bool:
    """Return whether fp8 can hold vectors of this group, `coded` values of each."""
    return not coded % 16 and not (_is_mixed(shape) and coded & (coded - 1))


def _is_mixed(shape: CacheShape) -> bool:
    """Return whether vectors of this group, an indexer's keys, are multiplied by a Hadamard matrix before fp8."""
    return shape.selector and shape.planes == 1


def _codable(shape: CacheShape) -> str:
    return "powers of two from 16 on" if _is_mixed(shape) else "multiples of 16"


def _kept_heads(shape: CacheShape, dtype: str, model: Model) -> CacheShape:
    """A group of KV heads in this format; states stay floats."""
    if dtype == "auto" or shape.snapshot:
        return shape
    if dtype == "bfloat16":
        if any(reads.dtype != torch.bfloat16 for reads in model.reads.values()):
            raise ConfigError("--kv-cache-dtype bfloat16: KV heads have the type that is computed in, here float32, or "
                              "fp8: leave the flag out, or also give --dtype bfloat16")
        return shape
    if shape.head_dim % 16:
        raise ConfigError(f"--kv-cache-dtype fp8: heads of this model have {shape.head_dim} values, and fp8 is for "
                          "multiples of 16: leave the flag out")
    return replace(shape, dtype=torch.uint8, head_dim=fp8.head_width(shape.head_dim), values=shape.head_dim)


def _kept(shape: CacheShape, dtype: str, coded: int, flag: str) -> CacheShape:
    """The group in this format, of whose vectors the first `coded` values are coded where it is fp8."""
    if dtype == "auto":
        return shape
    if dtype == "bfloat16":
        return replace(shape, dtype=torch.bfloat16)
    if not _is_codable(shape, coded):
        raise ConfigError(
            f"{flag} {dtype}: this model's {shape.name} vectors have {coded} values to code, and fp8 is for "
            f"{_codable(shape)}: leave the flag out")
    return replace(shape, dtype=torch.uint8, head_dim=fp8.width(shape.head_dim, coded), values=shape.head_dim)


def size_pools(config: Config, caches: Caches, max_position: int, free: int | Sequence[NodeMemory], *,
               selection: Selection | None = None, gpu: DeviceMemory | None = None,
               stages: Sequence[Caches] = (), block: int = 1) -> Sizes:
    """The core's numbers.

    caches    of the model, or of the stage with the largest slabs: pools have as many on every stage
    free      bytes of the host's memory that are free now, with the weights loaded; of machines, which
              have as many pages each, by machine
    gpu       memory of the device, if that is not the host's
    selection what a decode step selects and reads; None: it reads all
    stages    all of them, of which each has the tables of its own layers; (): `caches` is the only one
    block     tokens that layers with a state compute together of prompts, see `kernels.types.states.Blocks`
    Raises ConfigError when the pools do not fit into `free` or the context not into the pools.
    """
    kv = config.kv
    hosts = selection is not None and kv.host_decode != "off" and kv.host_tier is not False
    rooms = [NodeMemory(free, config.device.num_ranks, caches.host)] if isinstance(free, int) else free
    found = [(*(_memory(config, each, room, hosts) if gpu is None else
                _gpu_memory(config, each, room, hosts, gpu)), each)
             for room in rooms for each in [replace(caches, host=room.host)]]
    hbm, _, device, _ = min(found, key=lambda one: one[0])
    _, dram, _, caches = min(found, key=lambda one: one[3].host_pages(one[1]))
    num_device, num_host = caches.num_pages(hbm), caches.host_pages(dram)
    sizes = Sizes(core=CoreConfig(
        page_size=caches.page_size, rows=config.schedule.max_num_seqs, hbm_pages=num_device,
        dram_pages=num_host, retained_pages=int(kv.retained_share * (num_host or num_device)),
        step_tokens=config.schedule.num_step_tokens,
        chunk_multiple=1 if config.schedule.num_step_tokens < block or (kv.state_interval or 0) % block else block,
        max_len=max_position, overlap=config.schedule.async_scheduling,
        last_tokens=LAST_TOKENS if gpu is not None and config.pair.disaggregation_mode == "prefill" else 0,
        wait_pages=WAIT_BYTES[gpu is not None] // caches.page_bytes if dram else 0,
        disk_pages=STORED_PAGES // caches.slabs.slab_pages[0] * caches.slabs.slab_pages[0]
        if kv.kv_storage else 0,
        draft_tokens=config.schedule.num_drafts if config.pair.disaggregation_mode != "prefill" else 0,
        draft_positions=WIDE["cpu" if gpu is None else "cuda"] if config.schedule.num_drafts else 0,
        prefix_cache=kv.prefix_cache, groups=caches.groups, pp_size=config.device.pp,
        pp_together=config.device.pp_together or 1, role=config.pair.disaggregation_mode or "unified",
        peers=num_peer_slots(config)))
    stages = stages or (caches,)
    if selection is not None and hosts and dram:
        sizes = _hosting(config, caches, sizes.core, hbm, selection, device, stages)
    return replace(sizes, core=replace(sizes.core, max_len=_max_len(config, caches, sizes.core, selection, stages)))


def num_peer_slots(config: Config) -> int:
    """Engines of the other role that the core knows: one at least. A prefill instance behind a router has one more
    beside, who never says a word: prompts are his until a decode instance asks for them."""
    held = config.is_routed and config.pair.disaggregation_mode == "prefill"
    return max(1, config.pair.num_peers) + held


def _memory(config: Config, caches: Caches, at: NodeMemory, hosts: bool) -> tuple[int, int, str]:
    """Bytes of a rank's device pool and of the host pool, and what to call the first. Raises ConfigError."""
    kv, ranks, engines, free = config.kv, at.ranks, config.num_engines, at.free
    workspace = WORKSPACE_BYTES * ranks
    room = max(0, free - workspace)
    # Other engines measure the same bytes, now or when this one has taken its own.
    share = max(0, free // engines - workspace)
    hbm, dram = _split(kv, share, ranks, kv.host_tier or (hosts and kv.host_tier is None))
    part = f"1/{engines} of " if engines > 1 else ""
    device = (f"--kv-cache-memory-bytes {hbm}" if kv.kv_cache_memory_bytes is not None else
              f"--gpu-memory-utilization {kv.gpu_memory_utilization} of {part}the free memory, {hbm} bytes,")
    host = _host_words(kv, dram)
    if hbm * ranks + dram > room:
        of_each = f" of each of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"{device}{of_each} and {host} are {show_size(hbm * ranks + dram)}, but "
            f"{show_size(free)} of memory are free with the weights loaded, of which "
            f"{show_size(workspace)} stay for activations: at most {room} bytes together"
            f"{probe().limit}")
    _check_a_page(kv, caches, hbm, dram, hosts, device, host)
    return hbm, dram, device


def _gpu_memory(config: Config, caches: Caches, at: NodeMemory, hosts: bool,
                gpu: DeviceMemory) -> tuple[int, int, str]:
    """As `_memory`, of a device with memory of its own, in which each stage takes the same for KV."""
    kv, share, ranks, free = config.kv, config.kv.gpu_memory_utilization or 0.0, at.ranks, at.free
    assert kv.kv_cache_memory_bytes is not None or share, "an unresolved config"
    most = (gpu.free - gpu.workspace) // gpu.ranks
    room = most - int((1 - share) * gpu.total) // gpu.ranks
    used = f"weights and what else is in use {show_size(gpu.total - gpu.free)}, " \
           f"the largest step of --max-num-batched-tokens {config.schedule.max_num_batched_tokens} and " \
           f"--max-num-seqs {config.schedule.max_num_seqs} {show_size(gpu.workspace)}"
    hbm = room if kv.kv_cache_memory_bytes is None else kv.kv_cache_memory_bytes
    device = (f"--kv-cache-memory-bytes {hbm}" if kv.kv_cache_memory_bytes is not None else
              f"--gpu-memory-utilization {share} leaves {max(0, hbm)} bytes for KV, which")
    if hbm > most or hbm < caches.bytes_for(1):
        of_each = f" for each of {gpu.ranks} ranks" if gpu.ranks > 1 else ""
        raise ConfigError(
            f"{device} does not fit{of_each}: one page of {caches.page_size} tokens is {caches.bytes_for(1)} "
            f"bytes, and of {show_size(gpu.total)} {used}: at most {max(0, most)} bytes are left; lower "
            "--max-num-batched-tokens or --max-num-seqs, or "
            f"{'give at most that' if hbm > most else 'raise what KV may take'}")
    room = max(0, free - WORKSPACE_BYTES)
    dram = (int(hbm * ranks * kv.host_ratio) if kv.host_ratio is not None else
            kv.host_bytes if kv.host_bytes is not None else
            max(0, free // config.num_engines - WORKSPACE_BYTES) // 2
            if kv.host_tier or (hosts and kv.host_tier is None) else 0)
    host = _host_words(kv, dram)
    if dram > room:
        raise ConfigError(
            f"{host} is more than {show_size(free)} of memory that are free on the host, of which "
            f"{show_size(WORKSPACE_BYTES)} stay for the engine: at most {room} bytes{probe().limit}")
    _check_a_page(kv, caches, hbm, dram, hosts, device, host)
    return hbm, dram, device


def _host_words(kv: KVConfig, dram: int) -> str:
    return (f"--kv-offloading-size {kv.kv_offloading_size}, {dram} bytes," if kv.host_ratio is not None else
            f"--kv-offloading-size {dram}B" if kv.host_bytes is not None else
            f"half of what that leaves free, {dram} bytes for the host tier,")


def _check_a_page(kv: KVConfig, caches: Caches, hbm: int, dram: int, hosts: bool, device: str,
                  host: str) -> None:
    """Each pool that is wanted holds one page of each group. Raises ConfigError."""
    least = caches.bytes_for(1)
    if hbm < least:
        raise ConfigError(f"{device} is less than one page: {caches.page_size} tokens of this model "
                          f"are {least} bytes; raise --kv-cache-memory-bytes or lower --page-size"
                          f"{'' if kv.kv_cache_memory_bytes else probe().limit}")
    least = len(caches.host.slab_pages) * caches.host.slab_bytes
    if dram < least and (dram or kv.host_tier or (hosts and kv.host_bytes is None)):
        raise ConfigError(f"{host} is less than one page: "
                          f"{caches.page_size} tokens of this model are {least} bytes; 0 turns the "
                          "host tier off")


def _split(kv: KVConfig, room: int, ranks: int, host_tier: bool) -> tuple[int, int]:
    """Bytes of each rank's device pool and of the host pool. On a CPU all are of the same memory, `room`."""
    hbm, share = kv.kv_cache_memory_bytes, kv.gpu_memory_utilization or 0.0
    assert hbm is not None or share, "an unresolved config"
    if kv.host_ratio is not None:
        if hbm is None:
            hbm = int(room * share / (1 + share * kv.host_ratio)) // ranks
        dram = int(hbm * ranks * kv.host_ratio)
    elif kv.host_bytes is not None:
        dram = kv.host_bytes
    else:
        dram = max(0, room - (hbm or 0) * ranks) // 2 if host_tier else 0
    return int(max(0, room - dram) * share) // ranks if hbm is None else hbm, dram


def _hosting(config: Config, caches: Caches, core: CoreConfig, hbm: int, selection: Selection, device: str,
             stages: Sequence[Caches]) -> Sizes:
    """With hot buffers, whose state and tables are of the device's bytes: of each stage those of its layers that
    select, which may be most where slabs are small. Raises ConfigError."""
    kv, size, budget = config.kv, core.page_size, selection.budget
    most = largest_hot(kv, budget, size, core.draft_tokens, core.max_len)
    tokens = min(budget + size, most)
    hot, largest = -(-tokens // size), -(-most // size)
    core = replace(core, hot_pages=hot, hot_pages_max=largest, always_hosted=kv.host_decode == "always",
                   budget=budget)
    slabs = hot + len(caches.groups) - 1

    def tables(nbytes: int) -> list[int]:
        held = _held(caches, replace(core, hbm_pages=caches.num_pages(nbytes))) * size
        longest = min(config.model.max_model_len or core.max_len, held)
        return [table_bytes(stage, core.rows, longest, core.largest_hot, selection) for stage in stages]

    def least(nbytes: int) -> int:
        return max(slabs * stage.slabs.slab_bytes + taken
                   for stage, taken in zip(stages, tables(nbytes), strict=True))

    if hbm < least(hbm):
        need = least(0)
        while need < least(need):               # more memory may hold longer contexts, and their tables
            need = least(need)
        held = slabs * caches.slabs.slab_bytes
        raise ConfigError(
            f"{device} is too little for one hot buffer: {hot} pages of {size} tokens for "
            f"{tokens} tokens, and a slab of each group that stays on the device, are {show_size(held)}, "
            f"tables {show_size(need - held)}; raise --kv-cache-memory-bytes to at least {need}, or lower "
            "--hot-buffer-tokens or --sparse-top-k")
    taken = tables(hbm)
    core = replace(core, hbm_pages=min(
        stage.num_pages(hbm - of_stage) for stage, of_stage in zip(stages, taken, strict=True)))
    if core.dram_pages < hot:
        raise ConfigError(
            f"the host tier of {core.dram_pages} pages holds {core.dram_pages * size} tokens, less than "
            f"one hot buffer of {hot * size}: set --kv-offloading-size to at least "
            f"{caches.host_bytes_for(hot)}B, or to 0 for none")
    return Sizes(core=core, table_bytes=max(taken))


def largest_hot(kv: KVConfig, budget: int, page_size: int, draft_tokens: int, max_len: int) -> int:
    """Tokens of the largest hot buffer of a request that selects `budget` tokens a step."""
    most = kv.hot_buffer_tokens or max(max(HOT_BUDGETS, 1 + draft_tokens) * budget, budget + page_size)
    return min(most, -(-max_len // page_size) * page_size)


def table_bytes(caches: Caches, rows: int, max_len: int, hot_pages: int, selection: Selection) -> int:
    """Device bytes of the page tables of both tiers (int32) and of `memory.hot.HotBuffers`: a slot of
    each unit a row may have, unit and stamp of each slot, four counters, and the step. Where prompts select, too, also
    a layer's entries of the longest request, where chunks of an offloaded prompt read them."""
    layout, size = caches.layouts[0], caches.page_size
    unit, pages = selection.unit, -(-max_len // size)
    per_head = 4 * (pages * size // unit + 2 * hot_pages * size // unit) + 4 * 8
    whole = pages * layout.page_bytes // max(1, layout.num_layers) if selection.native else 0
    return whole + 4 + rows * (2 * 4 * pages * len(caches.layouts) + 4 * hot_pages
                       + layout.num_layers * layout.num_kv_heads * per_head)


def _held(caches: Caches, core: CoreConfig) -> int:
    """Pages of the longest context: on the device, or with a hot buffer, in host pages."""
    held = caches.context_pages(caches.nbytes(core.hbm_pages))
    if not core.hot_pages:
        return held
    staying = [g for g, group in enumerate(caches.groups) if not group.hosted]
    slabs = core.hbm_pages // caches.slabs.slab_pages[0] - core.hot_pages
    low, high = 0, core.dram_pages - core.store_pages * (core.dram_pages // core.host_units) + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(caches.slabs_for(middle, g) for g in staying) <= slabs
        low, high = (middle, high) if fits else (low, middle)
    return max(held, low)


def _max_len(config: Config, caches: Caches, core: CoreConfig, selection: Selection | None,
             stages: Sequence[Caches]) -> int:
    size, asked, held = core.page_size, config.model.max_model_len, _held(caches, core) * core.page_size
    if asked is None:
        return min(core.max_len, held)
    if asked > core.max_len:
        raise ConfigError(f"--max-model-len {asked}: this model's context is {core.max_len} tokens")
    if asked > held:
        pages = -(-asked // size)
        need = max(stage.bytes_for(pages) + (
            table_bytes(stage, core.rows, asked, core.largest_hot, selection) if selection and core.hot_pages else 0)
            for stage in stages)
        where = (f"the device pool holds {core.hbm_pages} pages of {size} tokens" if not core.hot_pages else
                 f"with {core.hot_pages} pages of hot buffer, {core.hbm_pages} device pages and "
                 f"{core.dram_pages} host pages of {size} tokens")
        raise ConfigError(
            f"--max-model-len {asked}: {where}, {held} in all; set --kv-cache-memory-bytes to at least "
            f"{need}, or --max-model-len to at most {held}")
    return asked


def show_size(n: int) -> str:
    return f"{n / (1 << 20):.1f} MiB" if n < 10 << 30 else f"{n / (1 << 30):.1f} GiB"
