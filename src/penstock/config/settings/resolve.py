"""Fills what the user left open, once, at start; nothing mutates the config later.

Owns the values that follow from the flags and the machine. What needs the model (its context
length, its name, free memory after loading) stays None and is decided by the engine.
"""
from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import fields, replace

from penstock.config.base.machine import Machine
from penstock.config.base.storage_url import masked
from penstock.config.settings.refuse import check
from penstock.config.settings.tree import SECRETS, Config, Kept

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def of_torchrun(raw: Config) -> Config:
    """With --nnodes, --node-rank and --dist-init-addr as torchrun's environment has them, where none of them
    was given and it names several processes: each is a node. The port is the one after its own."""
    nodes, (rank, size, host, port) = raw.nodes, (os.environ.get(name, "") for name in TORCHRUN)
    given = nodes.nnodes, nodes.node_rank, nodes.dist_init_addr
    if given != (None, None, None) or not (host and all(n.isdecimal() for n in (rank, size, port))) \
            or int(size) < 2:
        return raw
    host = f"[{host}]" if ":" in host else host
    return replace(raw, nodes=replace(nodes, nnodes=int(size), node_rank=int(rank),
                                      dist_init_addr=f"{host}:{int(port) + 1}"))


def resolve(raw: Config, machine: Machine) -> Config:
    """The config that the engine runs with. Raises ConfigError when it is refused."""
    schedule, device, model, kv = raw.schedule, raw.device, raw.model, raw.kv
    if schedule.max_waiting is None:
        schedule = replace(schedule, max_waiting=4 * schedule.max_num_seqs)
    if device.device == "auto":
        on_gpu = machine.device == "cuda" and device.gpu_layers != 0
        device = replace(device, device="cuda" if on_gpu else "cpu")
    if schedule.max_num_batched_tokens is None and device.device == "cpu":         # on a GPU the model tells
        schedule = replace(schedule, max_num_batched_tokens=512)
    if device.pp_together is None:          # a step of few rows takes a stage's GPU less time than its host
        device = replace(device, pp_together=32 if device.device == "cuda" and raw.nodes.num == 1 else 1)
    if device.threads is None:
        device = replace(device, threads=max(1, min(machine.cores, 1024) // max(1, raw.num_engines)))
    if kv.kv_storage is not None and kv.kv_offloading_size is None:
        kv = replace(kv, kv_offloading_size="auto")                # stored pages go through it
    kept: tuple[Kept, ...] = kv.kv_cache_dtype, kv.sparse_metadata_dtype
    latent, metadata = ("fp8_e4m3" if dtype == "fp8" else dtype for dtype in kept)
    kv = replace(kv, kv_cache_dtype=latent, sparse_metadata_dtype=metadata)
    if kv.gpu_memory_utilization is None:
        kv = replace(kv, gpu_memory_utilization=0.9 if device.device == "cuda" else 0.3)
    if model.dtype == "auto" and device.device == "cpu":
        model = replace(model, dtype="float32")         # on a GPU it is the checkpoint's
    if model.seed is None:
        # Drawn: with a constant, servers repeat their answers after every restart. Dummy weights
        # are for tests and measurements, which want the same ones again.
        drawn = int.from_bytes(os.urandom(4))
        model = replace(model, seed=0 if model.load_format == "dummy" else drawn)
    config = replace(raw, schedule=schedule, device=device, model=model, kv=kv)
    check(config, machine)
    return config


def lines(config: Config, *, without: Collection[str] = ()) -> Iterator[str]:
    """`name value` for every setting, in the order of the tree, but those `without`, as
    "section.field". A secret shows only as (set)."""
    for section in fields(config):
        part = getattr(config, section.name)
        for f in fields(part):
            if f"{section.name}.{f.name}" in without:
                continue
            value = getattr(part, f.name)
            if f"{section.name}.{f.name}" in SECRETS and value is not None:
                value = "(set)"
            elif f.name == "kv_storage" and isinstance(value, str):
                value = masked(value)
            shown = ",".join(value) if isinstance(value, tuple) else value
            yield f"{f.name} {'-' if shown in (None, '') else shown}"
