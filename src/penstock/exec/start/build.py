"""From a config to an engine that is ready: back-ends, weights, pools, one token as a proof.

Owns the order of start-up; the sizes of the pools are `sizing.py`.
"""
from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.config.base import machine
from penstock.config.base.errors import ConfigError
from penstock.config.base.sizes import counted
from penstock.config.request.selection import Selection
from penstock.config.settings.tree import Config, ScheduleConfig
from penstock.core.settings import CoreConfig
from penstock.exec.executor import Executor
from penstock.exec.graphs import mixed
from penstock.exec.graphs.steps import uncaptured
from penstock.exec.load.backends import block_of, selector_for
from penstock.exec.load.layout import Caches
from penstock.exec.load.sizing import DeviceMemory, NodeMemory, Sizes, kv_layout, show_size, size_pools
from penstock.exec.load.weights import LoadedModel, identity_of, kept_as, load, outline, show_dtype
from penstock.exec.pipeline.wire import Loaded, RankMemory
from penstock.exec.pipeline.workers import WorkerGroup
from penstock.exec.sampling.grammar import Grammars, Vocabulary, switched_off, whose
from penstock.exec.start.kinds import largest_chunk, one_page, take_each_kind
from penstock.exec.start.memory_use import MemoryUse
from penstock.exec.start.prove import prove, scratch
from penstock.exec.start.rank import Rank
from penstock.exec.start.rehearsal import Rehearsal
from penstock.exec.start.store import open_storage, storage_info
from penstock.exec.start.workspace import beyond, largest_step
from penstock.exec.step.links import nodes_of, of_config
from penstock.exec.waker import Waker
from penstock.kernels.c.build import triton_runs
from penstock.kernels.op import Unusable
from penstock.kernels.platform import KernelError, probe
from penstock.memory.lateness import Lateness
from penstock.memory.pinned import NotPinned
from penstock.memory.storage import HostPages
from penstock.model.base import Model, value_dim_of
from penstock.model.weights.checkpoint import weights_digest
from penstock.model.weights.locate import files_of, locate
from penstock.transfer.pages import PageBytes

# Tokens of a step on a GPU. Over 8,192 a layer of 36 MiB is 0.5 ms of arithmetic on an H200, about as long as
# it takes to launch.
STEP_TOKENS, SMALL_LAYER_BYTES = 8192, 36 << 20

ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "head_dim")
Info = dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine without its loop. `info` is flat: what was chosen and what it costs."""

    executor: Executor
    core_config: CoreConfig
    vocab_size: int
    max_model_len: int
    selection: Selection | None
    info: Info
    wakes: Waker                    # readable when `executor` has something to tell that no call waits for
    pages: PageBytes                # of all ranks, as far as they are on the host or of an engine of a pair
    stages: Sequence[Sequence[int]]             # by cache group: layers of each stage
    caches: Caches                  # of the whole model
    identity: dict[str, str]        # what another engine must have in common to read its KV, in words
    workers: WorkerGroup | None = None        # the ranks, where they are processes
    grammars: Grammars | None = None            # of the rank in this process, not begun


def _heads_of(model: Model) -> Info:
    """Return the KV heads of the first group that attention reads."""
    kv = next(group for group in model.groups if not (group.selector or group.snapshot))
    return {"num_kv_heads": kv.num_kv_heads, "head_dim": kv.head_dim}


def build_engine(config: Config, log: Callable[[str], object] = print, *,
                 lateness: Lateness | None = None,
                 vocabulary: Callable[[], Vocabulary | None] = switched_off) -> Built:
    """Load the model, size the pools, produce one token.

    log        takes one line at a time      lateness   when copies run; None: promptly
    vocabulary as for `exec.sampling.grammar.Grammars`
    Sets torch's thread count of this process.
    Raises ConfigError: no such model, a damaged or unsupported checkpoint, a back-end that cannot
    run here, memory that is not there, a context that does not fit.
    """
    started = time.perf_counter()
    wakes = Waker()
    parts = _start(config, log, lateness, wakes, vocabulary)
    core_config, caches, selection = parts.sizes.core, parts.caches, parts.selection
    model, layout, kv = parts.loaded.whole, parts.caches.layouts[0], config.kv
    identity: dict[str, str] = {}
    if config.pair.disaggregation_mode or kv.kv_storage is not None:
        identity = kv_identity(config, parts.loaded, selection, caches)
    if kv.kv_storage is not None:
        parts.executor.storage, root = open_storage(kv, identity, caches, parts.host, wakes.wake, log)
        core_config = replace(core_config, store_root=root, store_writes=not kv.is_readonly,
                              store_reused=kv.kv_storage_write_policy == "write_through_selective",
                              fetch_waits=kv.kv_storage_policy != "best_effort")
    seconds = time.perf_counter() - started
    whole = caches.bytes_for(-(-core_config.max_len // core_config.page_size))
    info: Info = {
        "model": parts.loaded.name, "load_format": parts.loaded.load_format,
        "dtype": show_dtype(parts.loaded.dtype), "device": config.device.device, "threads": parts.threads,
        "vocab_size": model.vocab_size, "max_model_len": core_config.max_len,
        "model_max_position": model.max_position, "num_layers": model.stage.end,
        **_heads_of(model),
        "page_size": core_config.page_size, "page_bytes": caches.page_bytes,
        "cache_groups": caches.words, "kv_bytes_per_token": caches.token_bytes, "kv_bytes_per_request": whole,
        "hbm_pages": core_config.hbm_pages, "hbm_bytes": caches.nbytes(core_config.hbm_pages),
        "dram_pages": core_config.dram_pages, "dram_bytes": parts.dram_bytes,
        **_sparse_info(selection, caches, parts.sizes), **kinds_of(caches, parts.loaded.dtype),
        "max_num_seqs": core_config.rows, "step_tokens": core_config.step_tokens,
        "speculative_method": config.schedule.speculative_method or "none", "draft_tokens": core_config.draft_tokens,
        "retained_pages_max": core_config.retained_pages, "grammar_backend": whose(config.model.grammar_backend),
        "seed": config.model.seed or 0, "overlap": core_config.overlap, **storage_info(kv),
        "prefix_cache": core_config.prefix_cache, "start_seconds": round(seconds, 3), **parts.info,
        "weight_bytes": parts.loaded.bytes, "load_peak_bytes": parts.loaded.peak,
        **{f"backend_{op}": str(choice) for op, choice in parts.loaded.backends.items()},
    }
    held, host = caches.nbytes(core_config.hbm_pages), core_config.dram_pages * core_config.page_size
    log(f"kv: {int(held / whole * core_config.max_len):,} tokens on the device ({show_size(held)}), "
        f"{host:,} in host memory ({show_size(parts.dram_bytes)}), in pages of {core_config.page_size}; "
        f"the device holds {held / whole:.1f} requests of {core_config.max_len:,}, {show_size(whole)} each")
    log(f"planner: up to {show_size(core_config.planner_bytes)} of CPU memory, when all pages are cached")
    caches.tell(log)
    if selection is not None:
        log(f"sparse decode: a query reads at most {selection.budget} tokens per KV head, in blocks of "
            f"{selection.unit}; hot buffers have {core_config.hot_pages * core_config.page_size} tokens "
            f"({show_size(core_config.hot_pages * layout.page_bytes)}), or up to "
            f"{core_config.largest_hot * core_config.page_size} while pages are free; their tables take "
            f"{show_size(parts.sizes.table_bytes)}")
        host, context = core_config.dram_pages * core_config.page_size, core_config.max_len
        if core_config.hot_pages and host < context:
            log(f"warning: the host tier holds {host} tokens and the context is {context}: requests whose "
                "max_tokens makes them longer than the host tier stay on the device; give fewer, or set "
                f"--kv-offloading-size to at least {caches.host_bytes_for(-(-context // core_config.page_size))}")
    if core_config.step_tokens < core_config.rows:
        log(f"warning: --max-num-batched-tokens {core_config.step_tokens} is below --max-num-seqs "
            f"{core_config.rows}: the youngest requests wait while older ones decode")
    return Built(executor=parts.executor, core_config=core_config, vocab_size=model.vocab_size, info=info,
                 max_model_len=core_config.max_len, selection=selection, wakes=wakes, pages=parts.pages,
                 stages=parts.stages, caches=caches, identity=identity, workers=parts.workers, grammars=parts.grammars)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """`caches` of the whole model; `threads` of each rank."""

    executor: Executor
    loaded: LoadedModel
    caches: Caches
    sizes: Sizes
    selection: Selection | None
    threads: int
    info: Info
    pages: PageBytes
    stages: Sequence[Sequence[int]]
    host: Sequence[HostPages]           # whole ones
    dram_bytes: int                     # of the host pools, of all machines
    workers: WorkerGroup | None = None
    grammars: Grammars | None = None


def kinds_of(caches: Caches, dtype: torch.dtype) -> dict[str, str]:
    """What pages are, of each cache group whose pages are not what is computed in."""
    return {f"{group.name}_dtype": "fp8_e4m3" if layout.dtype == torch.uint8 else show_dtype(layout.dtype)
            for group, layout in zip(caches.groups, caches.layouts, strict=True) if layout.dtype != dtype}


def kv_identity(config: Config, loaded: LoadedModel, selection: Selection | None,
                caches: Caches) -> dict[str, str]:
    """What two engines must have in common for one to go on from the other's KV, in words."""
    files = files_of(config.model)
    seed = config.model.seed or 0
    rope = {name: files.config[name] for name in ROPE if name in files.config}
    weights = f"dummy {seed}" if loaded.load_format == "dummy" else weights_digest(files)
    # Of one file: products with its codes are not those with what the codes stand for.
    kept = kept_as(config, loaded.dtype, loaded.packed)
    drafter = {"drafter": name} if (name := _drafter(config.schedule)) else {}
    products = {"products": "fp8"} if loaded.backends["linear"].name == "fp8" else {}
    return {
        "weights": weights, **drafter, **products, "weights kept as": f"{kept}, of {loaded.load_format}",
        "configuration": loaded.digest,
        "RoPE": json.dumps(rope, sort_keys=True, default=str),
        "KV dtype": show_dtype(loaded.dtype),
        **{f"pages: {name}": kind for name, kind in kinds_of(caches, loaded.dtype).items()},
        "selector": "none" if selection is None else
        f"{selection.selector} {selection.version}, units of {selection.unit}"
        + "".join(f", all of layer {i}" for i in selection.dense)}


def _drafter(schedule: ScheduleConfig) -> str:
    """What of it is in pages, in words."""
    if schedule.speculative_model is not None:
        return f"eagle3 {weights_digest(locate(schedule.speculative_model))}"
    return "mtp" if schedule.speculative_method == "mtp" else ""


def _start(config: Config, log: Callable[[str], object], lateness: Lateness | None, wakes: Waker,
           vocabulary: Callable[[], Vocabulary | None]) -> _Parts:
    """One rank in this process; or pipeline stages and their TP ranks, each in a process of its own, for which this
    one plans."""
    device, alone, tp_size = config.device.device, config.device.num_ranks == 1, config.device.tp
    cores, nodes = config.device.threads or machine.probe().cores, nodes_of(config)
    threads = max(1, cores // len(nodes[0]))
    if config.device.gpu_layers and device == "cpu":
        log(f"warning: --gpu-layers {config.device.gpu_layers}: the model runs on the CPU")
    if device == "cuda":
        _check_gpu()
    grammars = Grammars(vocabulary, wakes.wake) if alone else None
    use = MemoryUse(cuda=alone and device == "cuda")
    loaded = _load_here(config, log, threads, grammars, use) if grammars is not None else outline(config, log)
    config, layout = _with_step(config, loaded), loaded.layout
    caches, selection, max_position = layout.caches, layout.selection, loaded.whole.max_position
    stages = of_config(config, int(loaded.whole.stage.end))
    own = [caches.stage(stages[i], layout.groups, [stages[j] for j in node]) for node in nodes for i in node]
    widest = max(own, key=lambda c: c.slabs.slab_bytes)
    gpu, core, info, told = None, None, Info(), []
    workers: Rank | WorkerGroup
    if grammars is None:
        workers = WorkerGroup(config, int(loaded.whole.stage.end), own, wakes.wake, log)
        workers.vocab_size = loaded.whole.vocab_size
    else:
        workers = Rank(config, loaded, layout, caches, use, wakes.wake, grammars=grammars, lateness=lateness)
    try:
        if isinstance(workers, WorkerGroup):
            told = workers.loaded(identity_of(loaded))
        if device == "cuda":
            # Whether a hot buffer fits is not known yet: of a whole model no step selects while it is measured.
            plain = kv_layout(config, loaded.whole, loaded.dtype, selects=False) if alone else layout
            gpu = _measure(config, Rank(config, loaded, plain, plain.caches, use, wakes.wake) if alone else workers,
                           plain.caches, max_position, log)
            info |= {"gpu": torch.cuda.get_device_name(), "gpu_bytes": gpu.total, "workspace_bytes": gpu.workspace}
        rooms = [NodeMemory(machine.probe().memory_available if not n else min(told[i].free_bytes for i in node),
                            len(node), own[node.start].host) for n, node in enumerate(nodes)]
        sizes = size_pools(config, widest, max_position, rooms, selection=selection, gpu=gpu, stages=own,
                           block=block_of(loaded.backends))
        core = sizes.core
        if isinstance(workers, WorkerGroup):
            workers.vocabulary(vocabulary, tp_size)
        info |= _try_out(config, workers, loaded, core)
        workers.pools(core, capture=workers.captures, serves=True)
        if isinstance(workers, WorkerGroup):
            workers.serves()
    except BaseException as why:
        if isinstance(workers, WorkerGroup):
            workers.close()
        if isinstance(why, torch.OutOfMemoryError | NotPinned):
            raise _no_memory(why, caches, core) from None
        raise
    if device == "cuda":
        info["uncaptured_steps"] = uncaptured([rank.uncaptured for rank in workers.ranks], alone=workers.alone,
                                              graphs=config.device.cuda_graphs)
    if isinstance(workers, WorkerGroup):
        info |= _tell_ranks(config, workers, told, widest, core, threads, log)
        loaded = replace(loaded, bytes=sum(one.weight_bytes for one in told),
                         peak=max(one.peak_bytes for one in told))
    elif gpu is not None:
        info |= _tell_rank(workers, use, gpu, core, log)
    dram = [own[node.start].host_bytes(core) for node in nodes]
    if len(nodes) > 1:
        info |= {"nnodes": len(nodes), **{f"node_{n}_dram_bytes": size for n, size in enumerate(dram)}}
    return _Parts(executor=workers.executor(core.page_size), loaded=loaded, caches=caches, sizes=sizes,
                  selection=selection, threads=threads, info=info, pages=workers.seen(core, caches),
                  stages=[[one.layouts[g].num_layers for one in own[::tp_size]] for g in range(len(layout.groups))],
                  host=workers.host_pages(core, caches), dram_bytes=sum(dram),
                  workers=workers if isinstance(workers, WorkerGroup) else None, grammars=grammars)


def _no_memory(why: Exception, caches: Caches, core: CoreConfig | None) -> ConfigError:
    """Of a rank in this process. core: None: before pools had a size."""
    if isinstance(why, NotPinned):
        return ConfigError(f"{why}: give less with --kv-offloading-size, or 0 for no host tier")
    what = "what the start needs to measure steps does" if core is None else (
        f"{show_size(caches.nbytes(core.hbm_pages))} for KV and decode steps of --max-num-seqs {core.rows} do")
    return ConfigError(
        f"{what} not fit into what is left of the GPU's memory by now: lower "
        "--gpu-memory-utilization, or --kv-cache-memory-bytes if it was given; another process may have taken some")


def _try_out(config: Config, workers: Rank | WorkerGroup, loaded: LoadedModel, core: CoreConfig) -> Info:
    """Produce a token, and on a GPU take a step of each kind, so that none compiles while requests wait."""
    caches, max_position = loaded.layout.caches, loaded.whole.max_position
    trial = replace(scratch(caches, core.largest_hot), pp_size=config.device.pp)
    workers.pools(trial)
    prove(workers.executor(), trial, max_position, selector_for(loaded.layout.selection, loaded.whole))
    if config.device.device != "cuda":
        return {}
    started = time.perf_counter()
    trial = replace(one_page(caches, core.rows, core.max_len, core.largest_hot), pp_size=core.pp_size)
    workers.pools(trial)
    take_each_kind(workers.executor(), trial, largest_chunk(caches, core.step_tokens), core.budget)
    return {"warm_seconds": round(time.perf_counter() - started, 3)}


def _load_here(config: Config, log: Callable[[str], object], threads: int, grammars: Grammars,
               use: MemoryUse) -> LoadedModel:
    """The weights of the whole model, in this process."""
    device = config.device.device
    if device == "cuda":
        grammars.begin()            # other threads stand still meanwhile: not while requests wait
    # One thread: loading is many small operations, which two threads on busy cores slow down 4x. A GPU's
    # host has cores to spare, and what is loaded there is large.
    torch.set_num_threads(1 if device == "cpu" else min(threads, 8))
    rehearsal = Rehearsal(config, functools.partial(_longest, config), STEP_TOKENS, log)
    loaded = load(config, None, log, beside=rehearsal.begin)
    rehearsal.join()
    use.took("weights")
    torch.set_num_threads(threads)
    return loaded


def _tell_rank(rank: Rank, use: MemoryUse, gpu: DeviceMemory, core: CoreConfig,
               log: Callable[[str], object]) -> Info:
    """What the one rank has captured, and what its GPU's memory is used for."""
    info: Info = {}
    if rank.captures:
        info["capture_seconds"] = rank.capture_seconds
        words = rank.ranks[0].uncaptured and f"; launched kernel by kernel: {rank.ranks[0].uncaptured}"
        log(f"steps of up to {counted(core.rows, 'row')} captured in {rank.capture_seconds} s{words}")
    log(use.ended(gpu.workspace))
    return info | use.info()


def _tell_ranks(config: Config, workers: WorkerGroup, told: Sequence[Loaded], widest: Caches, core: CoreConfig,
                threads: int, log: Callable[[str], object]) -> Info:
    """What each of several ranks has, for the log and /server_info."""
    device, layers = config.device, [stage.end - stage.first for stage in of_config(config, workers.num_layers)]
    info: Info = {"pp": device.pp, "pp_layers": ",".join(map(str, layers[::device.tp])), "tp": device.tp,
                  **({"ep": device.expert_ranges} if device.expert_ranges > 1 else {})}
    for i, (n, mine, one, rank) in enumerate(zip(layers, workers.own, told, workers.ranks, strict=True)):
        used, given = mine.nbytes(core.hbm_pages), widest.nbytes(core.hbm_pages)
        info |= {f"rank_{i}_layers": n, f"rank_{i}_weight_bytes": one.weight_bytes,
                 f"rank_{i}_load_peak_bytes": one.peak_bytes, f"rank_{i}_hbm_bytes": used,
                 f"rank_{i}_hbm_unused_bytes": given - used, f"rank_{i}_pid": rank.process.pid,
                 **{f"rank_{i}_gpu_{part}_bytes": size for part, size in rank.use.items()}}
        log(f"rank {i}: {counted(n, 'layer')}, {show_size(one.weight_bytes)} of weights, {show_size(used)} "
            f"of KV ({show_size(given - used)} unused, as the widest rank has no more pages), "
            f"{counted(threads, 'thread')}")
    return info


def _check_gpu() -> None:
    """Raises ConfigError: torch or Triton cannot use it, whatever the model."""
    try:
        probe("cuda")
        triton_runs()
    except (KernelError, Unusable) as why:
        raise ConfigError(f"--device cuda: {why}") from None


def _with_step(config: Config, loaded: LoadedModel) -> Config:
    """With tokens of a step, where a GPU's were not given. Many keep it busy; where launching a layer takes
    longer than its arithmetic over them, no more than a captured step has."""
    if config.schedule.max_num_batched_tokens is not None:
        return config
    layers = loaded.model.stage.end - loaded.model.stage.first
    small = config.device.num_ranks == 1 and loaded.bytes < layers * SMALL_LAYER_BYTES
    # Of MLA KV in float32 a chunk of more tokens keeps others from decoding for ten seconds.
    small |= config.device.device == "cuda" and bool(value_dim_of(loaded.model)) and (
        loaded.dtype == torch.float32)
    return replace(config, schedule=replace(config.schedule,
                                            max_num_batched_tokens=mixed.TOKENS[-1] if small else STEP_TOKENS))


def _longest(config: Config, caches: Caches, max_position: int) -> int:
    """Tokens of the longest context that this model and the GPU's free memory may have."""
    return min(config.model.max_model_len or max_position,
               caches.context_pages(torch.cuda.mem_get_info()[0]) * caches.page_size)


def _measure(config: Config, workers: Rank | WorkerGroup, caches: Caches, max_position: int,
             log: Callable[[str], object]) -> DeviceMemory:
    """Memory of the GPU with the least room for each rank on it: what one takes at most another may take at the same
    time. Raises ConfigError: the largest step of a rank in this process does not fit."""
    schedule, longest = config.schedule, _longest(config, caches, max_position)
    core = replace(one_page(caches, schedule.max_num_seqs, longest), pp_size=config.device.pp)
    free = torch.cuda.mem_get_info()[0]
    try:
        workers.pools(core)
        largest_step(workers.executor(), core, schedule.num_step_tokens)
        told: Sequence[DeviceMemory | RankMemory] = workers.measured()
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"the largest step of --max-num-batched-tokens {schedule.max_num_batched_tokens} and --max-num-seqs "
            f"{schedule.max_num_seqs} does not fit into the {show_size(free)} of the GPU's memory that are "
            "free with the weights loaded: lower them") from None
    found = []
    for gpu in sorted(set(workers.places)):
        own = [one for one, place in zip(told, workers.places, strict=True) if place == gpu]
        found.append(DeviceMemory(
            total=own[0].total, free=own[-1].free, ranks=len(own),
            workspace=sum(one.workspace for one in own) + len(own) * beyond(caches, longest)))
    least = min(found, key=lambda one: (one.free - one.workspace) // one.ranks)
    if len(told) > 1:
        how = ("each has a GPU of its own" if workers.alone else f"they share {len(found)} GPUs, in turn"
               if len(found) > 1 else "they share one GPU, in turn")
        log(f"{counted(len(told), 'rank')}: {how}" + (
            "" if workers.captures else "; their steps are launched kernel by kernel"))
    log(f"{torch.cuda.get_device_name()}: {show_size(least.total)}, {show_size(least.free)} free with the weights "
        f"loaded, {show_size(least.workspace)} kept for the largest step")
    return least


def _sparse_info(selection: Selection | None, caches: Caches, sizes: Sizes) -> Info:
    """What a selection costs, for /server_info; nothing without one."""
    if selection is None:
        return {}
    layout, bounds = caches.layouts[:2]
    return {
        "sparse_top_k": selection.budget, "sparse_block_size": selection.unit,
        "sparse_unit": selection.unit,          # its old name, for one release more
        "selector_bytes_per_token": bounds.page_bytes // bounds.page_size,
        "hot_buffer_tokens": sizes.core.hot_pages * sizes.core.page_size,
        "hot_buffer_bytes": sizes.core.hot_pages * layout.page_bytes,
        "hot_buffer_tokens_max": sizes.core.largest_hot * sizes.core.page_size,
        "table_bytes": sizes.table_bytes,
    }
