"""`penstock bench`: offline with a MODEL, or on a running server with --base-url."""
from __future__ import annotations

import argparse
import asyncio

from penstock.bench.report import check_output
from penstock.config.base.errors import ConfigError
from penstock.config.settings.tree import Config

# name: (default, help). None of the others' flags is accepted and ignored.
OFFLINE = {"against": (None, "measure transformers' generate in turns with penstock"),
           "runs": (5, "repetitions of each workload"),
           "plot_hot": (None, "PNG file for the share of hits by size of the hot buffer; runs only this"),
           "hot_context": (4000, "prompt tokens of --plot-hot"),
           "speculative": (False, "with and without drafts, in turns; share of accepted drafts; runs only this")}
SERVER = {"bearer": (None, "API key that is sent to the server"),
          "num_prompts": (64, "number of requests"),
          "request_rate": (0.0, "requests a second, Poisson; 0 sends all at once"),
          "concurrency": (0, "requests open at once; 0 is no limit"),
          "input_len": (256, "prompt tokens"),
          "token_id_max": (1000, "prompts are random ids below this")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench")
    group.add_argument("--base-url", help="measure this server instead of a MODEL, "
                                          "e.g. http://127.0.0.1:8000")
    for where, flags in (("offline", OFFLINE), ("server", SERVER)):
        for name, (default, text) in flags.items():
            flag, about = f"--{name.replace('_', '-')}", f"{where}: {text}"
            if default is False:
                group.add_argument(flag, help=about, action="store_true", default=None)
                continue
            group.add_argument(flag, help=about, type=type(default) if default is not None else str,
                               choices=("transformers",) if name == "against" else None)
    group.add_argument("--output-len", type=int, default=128, help="new tokens of a request")
    group.add_argument("--bench-seed", dest="bench_seed", type=int, default=0,
                       help="seed of prompts and arrivals")
    group.add_argument("--output-json", help="file for every single measurement")
    group.add_argument("--plot", help="PNG file for a plot")
    group.add_argument("--quiet", action="store_true", help="no progress bar; a file never gets one")


def run(config: Config | None, args: argparse.Namespace) -> int:
    if args.base_url and config is not None:
        raise ConfigError("bench takes a MODEL or --base-url, not both")
    if not args.base_url and config is None:
        raise ConfigError("bench needs a MODEL to measure here, or --base-url of a running server")
    for name in SERVER if config is not None else OFFLINE:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for a bench of "
                              + ("a server, with --base-url" if config is not None else "a MODEL"))
    for name, (default, _) in {**OFFLINE, **SERVER}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    for name in ("runs", "hot_context", "num_prompts", "input_len", "output_len", "token_id_max"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}: at least 1")
    check_output("--output-json", args.output_json)
    args.seed = args.bench_seed
    if config is None:
        from penstock.bench import load
        return asyncio.run(load.measure(args))
    if args.speculative:
        from penstock.bench import speculation
        return asyncio.run(speculation.measure(config, args))
    if args.plot_hot is not None:
        from penstock.bench import hot
        return asyncio.run(hot.measure(config, args))
    from penstock.bench import offline
    return asyncio.run(offline.measure(config, args))
