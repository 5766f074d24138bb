"""From `penstock serve` to its ready line, Qwen3-8B shape on the GPU: weights in the page cache, no kernel
compiled before (cold), and again (warm).

    PYTHONPATH=src python bench/device/ready.py OUT FOLDER [--make]      FOLDER gets 16 GB of random weights
"""
from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from direct import QWEN3_8B, write
from safetensors.torch import save_file
from serving import serving

from penstock.model import registry as families

SHARD_BYTES = 2 << 30
FLAGS = ("--device", "auto", "--max-num-seqs", "32", "--max-num-batched-tokens", "8192", "--max-model-len", "16384",
         "--load-format", "safetensors")


def make(folder: Path) -> None:
    """Random weights, normal with 0.02, norms 1, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B | {"torch_dtype": "bfloat16"}))
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    size = number = 0
    for name, shape in families.tensor_shapes(QWEN3_8B):
        tensor = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
        shard[name] = (tensor if len(shape) == 1 else tensor.normal_(0, 0.02)).cpu()
        where[name] = f"model-{number:05}.safetensors"
        size += tensor.numel() * 2
        if size > SHARD_BYTES:
            save_file(shard, folder / where[name])
            shard, size, number = {}, 0, number + 1
    save_file(shard, folder / f"model-{number:05}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", action="store_true", help="make the weights, and no more")
    args = parser.parse_args()
    if args.make:
        started = time.perf_counter()
        make(args.folder)
        print(f"made in {time.perf_counter() - started:.1f} s")
        return
    row: dict[str, object] = {"flags": " ".join(FLAGS)}
    os.environ["TRITON_CACHE_DIR"] = str(args.folder / "triton")
    for name in ("cold", "warm"):
        with serving(*FLAGS, model=str(args.folder)) as server:
            info = server.get("/server_info")
            told = "start_seconds", "capture_seconds", "workspace_bytes", "hbm_bytes", "dtype"
            row[name] = {"ready_s": server.ready_s} | {k: info[k] for k in told}
            print(name, row[name], flush=True)
    write("ready", args.out, [row])


if __name__ == "__main__":
    main()
