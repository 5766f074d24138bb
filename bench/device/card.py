"""A card of 24 GB: a 32-billion model of int4 weights decodes requests of 131,072 tokens out of host memory, over HTTP.

    PYTHONPATH=src python bench/device/card.py OUT [--shape qwen3-32b | tiny] [FLAGS of serve ...]

Dummy weights of Qwen3-32B's shape in groups of 128, random prompts. First one request, whose prompt is computed; then
two at once, of which fifteen sixteenths are that prompt's: they find these in host memory. `gpu_bytes`: what nvidia-smi
says is in use beyond what was before the start, at its most, until the server is ready and then. It counts memory that
torch keeps and would give up on a small card. Fails where requests decode without reading host memory, or serving takes
more than the card has. OUT has a row for each, and the server's log next to it.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crowd import stream
from direct import QWEN3_8B
from serving import serving

CARD = 24 << 30
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}}}}
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600,
    "max_position_embeddings": 132096, "torch_dtype": "bfloat16", "eos_token_id": 0, "quantization_config": INT4}
TINY = QWEN3_32B | {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "head_dim": 32, "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 4096}
COMMON = ("--sparse-block-size", "16", "--kv-cache-dtype", "fp8", "--sparse-metadata-dtype", "fp8_e4m3",
          "--max-num-seqs", "2")
# Of each: config.json, tokens of a prompt, flags.
SHAPES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "qwen3-32b": (QWEN3_32B, 131_072, (
        "--sparse-top-k", "2048", "--kv-cache-memory-bytes", "3G", "--kv-offloading-size", "48",
        "--max-num-batched-tokens", "2048", *COMMON)),
    "tiny": (TINY, 3_000, (
        "--sparse-top-k", "256", "--kv-cache-memory-bytes", "400K", "--kv-offloading-size", "64M",
        "--max-num-batched-tokens", "256", *COMMON))}


def used() -> int:
    """Bytes of the first GPU that are in use; 0 without one."""
    with contextlib.suppress(OSError):
        run = subprocess.run(["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                             capture_output=True, text=True)
        return int(run.stdout.strip() or 0) << 20
    return 0


@contextlib.contextmanager
def watched() -> Iterator[dict[str, int]]:
    """`most` of what is in use meanwhile, beyond what is now."""
    before, found, ended = used(), {"most": 0}, threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            found["most"] = max(found["most"], used() - before)
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield found
    finally:
        ended.set()
        watching.join()


async def requests(url: str, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """All at once. Tokens a second: of all, from the last first token to the first end."""
    began = time.perf_counter()
    got = await asyncio.gather(*(stream(url, prompt, new) for prompt in prompts))
    begin, end = max(times[1] for times in got), min(times[-1] for times in got)
    assert begin < end, "no time in which all of them decode: raise --new"
    return {"requests": len(prompts), "prompt_tokens": [*map(len, prompts)], "new_tokens": new,
            "first_token_s": [times[1] - times[0] for times in got], "seconds": time.perf_counter() - began,
            "decode_tokens_s": sum(begin < at <= end for times in got for at in times[1:]) / (end - begin)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-32b")
    parser.add_argument("--new", type=int, default=64, help="tokens of the first request; of two four times as many")
    args, flags = parser.parse_known_args()
    config, tokens, given = SHAPES[args.shape]
    rng, rows = random.Random(0), []
    first = rng.choices(range(10, config["vocab_size"]), k=tokens)
    shared = first[:tokens * 15 // 16]
    two = [shared + rng.choices(range(10, config["vocab_size"]), k=tokens - len(shared)) for _ in range(2)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with (tempfile.TemporaryDirectory() as folder, args.out.with_suffix(".log").open("w") as log, watched() as most):
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with serving("--load-format", "dummy", *given, *flags, model=folder, stderr=log) as server:
            starting, most["most"] = most["most"], 0
            for prompts, new in (([first], args.new), (two, 4 * args.new)):
                before = server.get("/server_info")["stats"]
                row = asyncio.run(requests(server.url, prompts, new))
                stats = server.get("/server_info")["stats"]
                for name in ("hot_hits_total", "hot_misses_total"):
                    row[name] = int(sum(n - before.get(key, 0) for key, n in stats.items() if key.startswith(name)))
                time.sleep(1)
                rows.append(row | {"gpu_bytes": most["most"]})
                print(row | {"gpu_bytes": f"{most['most']:,}"}, flush=True)
            info = server.get("/server_info")
    kept = {key: info[key] for key in sorted(info) if key.endswith("_bytes") or key in ("gpu", "hbm_pages", "dtype")}
    found = {"shape": args.shape, "flags": [*given, *flags], "ready_s": server.ready_s,
             "gpu_bytes_at_start": starting, "card_bytes": CARD, "info": kept, "rows": rows}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: found[key] for key in ("ready_s", "gpu_bytes_at_start", "info")}, indent=1))
    assert all(row["hot_misses_total"] for row in rows), "no request has read host memory"
    assert most["most"] < CARD, f"{most['most']:,} bytes in use, and the card has {CARD:,}"


if __name__ == "__main__":
    main()
