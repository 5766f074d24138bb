"""`penstock bench`: offline with a MODEL, or on a running server with --base-url."""
from __future__ import annotations

import argparse
import asyncio

from penstock.config.errors import ConfigError
from penstock.config.tree import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench")
    group.add_argument("--against", choices=("transformers",),
                       help="offline: measure transformers' generate in turns with penstock")
    group.add_argument("--runs", type=int, default=5, help="offline: repetitions of each workload")
    group.add_argument("--base-url", help="measure this server instead, e.g. http://127.0.0.1:8000")
    group.add_argument("--bearer", help="API key that is sent to the server")
    group.add_argument("--num-prompts", type=int, default=64, help="server: requests in all")
    group.add_argument("--request-rate", type=float, default=0.0,
                       help="server: requests a second, Poisson; 0 sends all at once")
    group.add_argument("--concurrency", type=int, default=0,
                       help="server: requests open at once; 0 is no limit")
    group.add_argument("--input-len", type=int, default=256, help="server: prompt tokens")
    group.add_argument("--output-len", type=int, default=128, help="new tokens of a request")
    group.add_argument("--token-id-max", type=int, default=1000,
                       help="server: prompts are random ids below this")
    group.add_argument("--bench-seed", dest="bench_seed", type=int, default=0,
                       help="of prompts and arrivals")
    group.add_argument("--output-json", help="file for every single measurement")
    group.add_argument("--plot", help="PNG file for a plot")
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def run(config: Config | None, args: argparse.Namespace) -> int:
    for name in ("runs", "num_prompts", "input_len", "output_len", "token_id_max"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}: at least 1")
    args.seed = args.bench_seed
    if args.base_url:
        if config is not None:
            raise ConfigError("bench takes a MODEL or --base-url, not both")
        from penstock.bench import load
        return asyncio.run(load.measure(args))
    if config is None:
        raise ConfigError("bench needs a MODEL to measure here, or --base-url of a running server")
    from penstock.bench import offline
    return asyncio.run(offline.measure(config, args))
