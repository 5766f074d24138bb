"""From a config to an engine that is ready: back-ends, weights, pools, one token as a proof.

Owns the order of start-up; the sizes of the pools are `sizing.py`.
"""
from __future__ import annotations

import ctypes
import functools
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.config import platform as machine
from penstock.config.errors import ConfigError
from penstock.config.paths import cache_dir
from penstock.config.selection import Selection, selection_of
from penstock.config.tree import Config
from penstock.core.settings import CoreConfig
from penstock.exec.attend import LatentOps
from penstock.exec.caches import Caches, caches_of
from penstock.exec.front import Front
from penstock.exec.prove import prove
from penstock.exec.rank import Rank
from penstock.exec.selecting import Selector
from penstock.exec.sizing import Sizes, groups_of, show_size, size_pools
from penstock.kernels import index_select, latent_attention, layer, linear, paged_attention, registry
from penstock.kernels.platform import KernelError, probe
from penstock.kernels.select import SelectRule
from penstock.memory.lateness import Lateness
from penstock.model import registry as families
from penstock.model.base import Model
from penstock.model.checkpoint import open_checkpoint
from penstock.model.locate import locate

Info = dict[str, str | int | float | bool | None]

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
TRIM_BYTES = 64 << 20         # weights loaded between two trims of the heap


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine without its loop. `info` is flat: what was chosen and what it costs."""

    executor: Front
    core_config: CoreConfig
    vocab_size: int
    max_model_len: int
    selection: Selection | None
    info: Info


def build_engine(config: Config, log: Callable[[str], object] = print, *,
                 lateness: Lateness | None = None) -> Built:
    """Load the model, size the pools, produce one token.

    log        takes one line at a time      lateness   when copies run; None: promptly
    Sets torch's thread count of this process.
    Raises ConfigError: no such model, a damaged or unsupported checkpoint, a back-end that cannot
    run here, memory that is not there, a context that does not fit.
    """
    started = time.perf_counter()
    threads = config.device.threads or machine.probe().cores
    torch.set_num_threads(threads)
    dtype = DTYPES[config.model.dtype]
    rss_before = _peak_rss()
    # One thread: loading is many small operations, which two threads on busy cores slow down 4x.
    torch.set_num_threads(1)
    loaded = _load(config, dtype, log)
    torch.set_num_threads(threads)
    load_peak = _peak_rss() - rss_before
    model, backends = loaded.model, loaded.backends
    selection = _selection(config, model)
    groups = groups_of(model, selection)
    caches = caches_of(groups, config.kv.page_size, dtype)
    sizes = size_pools(config, caches, model.max_position, machine.probe().memory_available,
                       budget=selection.budget if selection else 0)
    core_config = sizes.core
    attention = _attention(backends)
    selector = _selector(selection, core_config, backends)
    prove(model, attention, caches, groups, selector)
    seed = config.model.seed or 0         # `resolve` has drawn one for a server
    executor = Front([Rank(model, attention, *caches.pools(core_config), rows=core_config.rows,
                           max_len=core_config.max_len, seed=seed, lateness=lateness, groups=groups,
                           selector=selector)])
    seconds = time.perf_counter() - started
    info: Info = {
        "model": loaded.name, "load_format": loaded.load_format,
        "dtype": _short(dtype), "device": "cpu", "threads": threads,
        "vocab_size": model.vocab_size, "max_model_len": core_config.max_len,
        "model_max_position": model.max_position,
        "num_layers": len(model.groups[0].layers), "num_kv_heads": model.groups[0].num_kv_heads,
        "head_dim": model.groups[0].head_dim, "page_size": core_config.page_size,
        "page_bytes": caches.page_bytes,
        "kv_bytes_per_token": caches.page_bytes // core_config.page_size,
        "hbm_pages": core_config.hbm_pages, "hbm_bytes": caches.nbytes(core_config.hbm_pages),
        "dram_pages": core_config.dram_pages, "dram_bytes": caches.nbytes(core_config.dram_pages),
        **_sparse_info(selection, caches, sizes),
        "max_num_seqs": core_config.rows, "step_tokens": core_config.step_tokens,
        "seed": seed, "overlap": core_config.overlap, "prefix_cache": core_config.prefix_cache,
        "weight_bytes": loaded.bytes, "load_peak_bytes": load_peak,
        "start_seconds": round(seconds, 3),
        **{f"backend_{op}": str(choice) for op, choice in backends.items()},
    }
    log(f"kv: {core_config.hbm_pages} device pages and {core_config.dram_pages} host pages of "
        f"{core_config.page_size} tokens ({caches.page_bytes} bytes); context {core_config.max_len}")
    caches.tell(log)
    if selection is not None:
        log(f"sparse: a step reads at most {selection.budget} tokens of each KV head, in units of "
            f"{selection.unit}; hot buffers of {core_config.hot_pages * core_config.page_size} tokens "
            f"({show_size(core_config.hot_pages * caches.layouts[0].page_bytes)}), "
            f"tables {show_size(sizes.table_bytes)}")
    if core_config.step_tokens < core_config.rows:
        log(f"warning: --step-tokens {core_config.step_tokens} is below --max-num-seqs "
            f"{core_config.rows}: the youngest requests wait while older ones decode")
    return Built(executor=executor, core_config=core_config, vocab_size=model.vocab_size,
                 max_model_len=core_config.max_len, selection=selection, info=info)


def _sparse_info(selection: Selection | None, caches: Caches, sizes: Sizes) -> Info:
    """What a selection costs, for /server_info; nothing without one."""
    if selection is None:
        return {}
    layout, bounds = caches.layouts[:2]
    return {
        "sparse_top_k": selection.budget, "sparse_unit": selection.unit,
        "selector_bytes_per_token": bounds.page_bytes // bounds.page_size,
        "hot_buffer_tokens": sizes.core.hot_pages * sizes.core.page_size,
        "hot_buffer_bytes": sizes.core.hot_pages * layout.page_bytes,
        "table_bytes": sizes.table_bytes,
    }


def _selection(config: Config, model: Model) -> Selection | None:
    """What an ordinary model selects by. One that chooses its tokens itself takes no other choice; its rows
    are read from device pages only. Raises ConfigError where flags ask for more."""
    kv, topk = config.kv, model.attention.topk
    if not topk:
        return selection_of(kv)
    if kv.sparse_top_k not in (None, topk):
        raise ConfigError(f"--sparse-top-k {kv.sparse_top_k}: this model chooses {topk} tokens itself, as "
                          "its config.json says (index_topk): leave the flag out")
    for flag, given in (("--sparse-kv", kv.sparse_kv if kv.sparse_kv != "off" else None),
                        ("--hot-buffer-tokens", kv.hot_buffer_tokens),
                        ("--sparse-dense-layers", kv.sparse_dense_layers or None)):
        if given is not None:
            raise ConfigError(f"{flag} {given}: host pages are not built yet for a model that chooses its "
                              f"{topk} tokens itself: leave the flag out")
    return None


def _backends(config: Config, ops: Sequence[str], log: Callable[[str], object]) -> dict[str, registry.Choice]:
    requested = dict(pair.split("=", 1) for pair in config.device.backends)
    try:
        choices = registry.select(probe("cpu", cache_dir() / "kernels"), requested, ops)
    except KernelError as e:
        raise ConfigError(f"--backends {','.join(config.device.backends)}: {e}") from None
    for choice in choices.values():
        log(str(choice))
    return choices


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model with its weights, and what is worth telling about them; `bytes` in the dtype used."""

    model: Model
    backends: dict[str, registry.Choice]
    name: str
    load_format: str
    bytes: int


def _load(config: Config, dtype: torch.dtype, log: Callable[[str], object]) -> _Loaded:
    """Stream the weights in: one source tensor at a time, and freed ones go back to the system."""
    started = time.perf_counter()
    files = locate(config.model.model, load_format=config.model.load_format)
    name, load_format = files.name, files.load_format
    checkpoint = open_checkpoint(files)
    backends = _backends(config, ("linear", "layer", *families.ops_of(checkpoint.config),
                                 *(registry.SELECTING if selection_of(config.kv) else ())), log)
    pack = functools.partial(linear.pack, backend=backends["linear"].name)
    model = families.build(checkpoint.config, dtype=dtype, linear=pack,
                           ops=layer.ops(backends["layer"].name))
    _check_weights_fit(name, families.tensor_shapes(checkpoint.config), dtype)
    tensors: Iterable[tuple[str, Tensor]] = (
        families.dummy_tensors(checkpoint.config, config.model.seed or 0, model.wants)
        if load_format == "dummy" else checkpoint.tensors(model.wants))
    loaded = trimmed = 0
    for tensor_name, tensor in tensors:
        loaded += tensor.numel() * dtype.itemsize
        model.load(tensor_name, tensor)
        del tensor                        # or it would live while the next one is read
        if loaded - trimmed > TRIM_BYTES:
            trimmed = loaded
            _trim_heap()
    # A GGUF's header holds its whole tokenizer; `finish` may pack a large head: not both at once.
    del tensors, checkpoint, files
    _trim_heap()
    model.finish()
    log(f"model: {name}, {show_size(loaded)} of weights as {_short(dtype)} in "
        f"{time.perf_counter() - started:.1f} s")
    return _Loaded(model, backends, name, load_format, loaded)


def _attention(backends: Mapping[str, registry.Choice]) -> paged_attention.Planner | LatentOps:
    """What a rank attends with, of the ops that the model's family needs."""
    if "latent_attention" in backends:
        return LatentOps(index_select.index_select(backends["index_select"].name),
                         latent_attention.latent_attention(backends["latent_attention"].name))
    return functools.partial(paged_attention.plan, backend=backends["paged_attention"].name)


def _selector(selection: Selection | None, core: CoreConfig,
              backends: Mapping[str, registry.Choice]) -> Selector | None:
    """How a rank selects, in the words of its kernels."""
    return None if selection is None else Selector(
        rule=SelectRule(unit=selection.unit, sink=selection.sinks, window=selection.window),
        hot_pages=core.hot_pages, backends={op: backends[op].name for op in registry.SELECTING})


def _check_weights_fit(name: str, shapes: Iterable[tuple[str, tuple[int, ...]]],
                       dtype: torch.dtype) -> None:
    need = sum(math.prod(shape) for _, shape in shapes) * dtype.itemsize
    free = machine.probe().memory_available
    if need > free:
        raise ConfigError(f"{name}: its weights take {show_size(need)} as {_short(dtype)} and "
                          f"{show_size(free)} of memory are free: take a smaller model or "
                          "--dtype bfloat16")


def _trim_heap() -> None:
    """Give freed memory back where the C library can: glibc keeps freed weights of up to 32 MiB,
    42 MiB of them after loading SmolLM2 in float32."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _peak_rss() -> int:
    """Largest resident size of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
