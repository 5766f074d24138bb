"""How large the pools become, from the flags, the model and the memory that is free.

Owns every number that depends on both. What is asked for and does not fit is refused here, with the
numbers and the flag to change.
"""
from __future__ import annotations

from penstock.config.errors import ConfigError
from penstock.config.tree import Config, KVConfig
from penstock.core.settings import CoreConfig
from penstock.exec.caches import Caches

# Left for activations, logits and the allocator when pools are sized: a step of 512 tokens of a
# model of 1.5 B parameters needs about half of it.
WORKSPACE_BYTES = 256 << 20


def size_pools(config: Config, caches: Caches, max_position: int, free: int) -> CoreConfig:
    """The core's numbers. `free`: bytes of memory that are free now, with the weights loaded.

    Raises ConfigError when the pools do not fit into `free` or the context not into the pool.
    """
    kv, page = config.kv, caches.bytes_for(1)
    room = max(0, free - WORKSPACE_BYTES)
    hbm, dram = _split(kv, room)
    device = (f"--hbm-bytes {hbm}" if kv.hbm_bytes is not None else
              f"--memory-fraction {kv.memory_fraction} of the free memory, {hbm} bytes,")
    host = (f"--dram-ratio {kv.dram_ratio} times that, {dram} bytes," if kv.dram_ratio is not None else
            f"--dram-bytes {dram}" if kv.dram_bytes is not None else
            f"half of what that leaves free, {dram} bytes for the host tier,")
    if hbm + dram > room:
        raise ConfigError(
            f"{device} and {host} are {show_size(hbm + dram)}, but "
            f"{show_size(free)} of memory are free with the weights loaded, of which "
            f"{show_size(WORKSPACE_BYTES)} stay for activations: at most {room} bytes together")
    if hbm < page:
        raise ConfigError(f"{device} is less than one page: {kv.page_size} tokens of this model "
                          f"are {page} bytes; raise --hbm-bytes or lower --page-size")
    if (dram or kv.host_tier) and dram < page:
        raise ConfigError(f"{host} is less than one page: "
                          f"{kv.page_size} tokens of this model are {page} bytes; 0 turns the "
                          "host tier off")
    return CoreConfig(
        page_size=kv.page_size, rows=config.schedule.max_num_seqs, hbm_pages=caches.num_pages(hbm),
        dram_pages=caches.num_pages(dram), step_tokens=config.schedule.step_tokens,
        max_len=_max_len(config, caches, max_position, hbm), overlap=config.schedule.overlap,
        prefix_cache=kv.prefix_cache, groups=caches.groups)


def _split(kv: KVConfig, room: int) -> tuple[int, int]:
    """Bytes of the device pool and of the host pool. On a CPU both are of the same memory, `room`."""
    hbm, share = kv.hbm_bytes, kv.memory_fraction
    if kv.dram_ratio is not None:
        if hbm is None:
            hbm = int(room * share / (1 + share * kv.dram_ratio))
        dram = int(hbm * kv.dram_ratio)
    elif kv.dram_bytes is not None:
        dram = kv.dram_bytes
    else:
        dram = max(0, room - (hbm or 0)) // 2 if kv.host_tier else 0
    return int(max(0, room - dram) * share) if hbm is None else hbm, dram


def _max_len(config: Config, caches: Caches, max_position: int, hbm: int) -> int:
    size, pages = config.kv.page_size, caches.context_pages(hbm)
    asked, held = config.model.max_model_len, pages * size
    if asked is None:
        return min(max_position, held)
    if asked > max_position:
        raise ConfigError(f"--max-model-len {asked}: this model's context is {max_position} tokens")
    if asked > held:
        need = caches.bytes_for(-(-asked // size))
        raise ConfigError(
            f"--max-model-len {asked}: the device pool holds {pages} pages of {size} "
            f"tokens, {held} in all; set --hbm-bytes to at least {need}, or --max-model-len to at "
            f"most {held}")
    return asked


def show_size(n: int) -> str:
    return f"{n / (1 << 20):.1f} MiB" if n < 10 << 30 else f"{n / (1 << 30):.1f} GiB"
