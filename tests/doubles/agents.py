"""The agents of nodes beside node 0, as processes on this machine, with the flags that node 0 has."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

import torch
import where

from penstock.config.base import machine

Agents = list[subprocess.Popen[bytes]]


def started(model: str, options: Mapping[str, object]) -> tuple[dict[str, object], Agents]:
    """The options of node 0, which say where it listens, and the agents."""
    if "nnodes" not in options:
        return dict(options), []
    with socket.create_server(("127.0.0.1", 0)) as free:
        ours = {**options, "dist_init_addr": f"127.0.0.1:{free.getsockname()[1]}"}
    os.environ["PENSTOCK_CLUSTER_KEY"] = "0123456789abcdef"
    return ours, [subprocess.Popen([sys.executable, "-m", "penstock.cli.main", "serve", model,
                                    *flags(ours), f"--node-rank={rank}"], env=_own_gpu(rank))
                  for rank in range(1, int(str(options["nnodes"])))]


def _own_gpu(node: int) -> dict[str, str] | None:
    """Here all nodes have the same GPUs: each sees the one that it would have, where there are as many."""
    return machine.of_gpus([node % torch.cuda.device_count()]) if where.DEVICE == "cuda" else None


def flags(options: Mapping[str, object]) -> list[str]:
    """Of a command line; those of a pair are of node 0 alone."""
    found = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None or name.startswith(("pair_", "disaggregation_")):
            continue
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{flag[2:]}")
        else:
            found.append(f"{flag}={','.join(value) if isinstance(value, (list, tuple)) else value}")
    return found


def ended(agents: Agents) -> None:
    """As they do when node 0 was asked to end."""
    assert not any([agent.wait(60) for agent in agents]), "an agent has not ended as it should"
