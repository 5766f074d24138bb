"""The command `penstock`: picks a subcommand and imports its module only then.

A subcommand module has `add_arguments(parser)` for flags of its own (the config tree's flags are
added here) and `run(config, args) -> int`. `args.command` is its name. A ConfigError becomes one
line a reason and exit code 2. Nothing heavy is imported here: `penstock --help` stays instant.
"""
from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.config.base.errors import ConfigError
from penstock.config.base.version import version

if TYPE_CHECKING:
    import argparse

    from penstock.config.settings.tree import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`model` says whether the config flags are taken: MODEL needed, optional, or no config. `takes`: all of them,
    those of a worker behind another frontend, or those of the library."""

    module: str
    help: str
    model: Literal["needed", "optional", "none"]
    own_flags: bool = True              # False: its module is not imported for --help
    takes: Literal["all", "worker", "library"] = "library"
    resolves: bool = True               # False: its config is for another machine, and the module resolves it


COMMANDS = {
    "serve": Command(module="penstock.api.server", model="needed", own_flags=False, takes="all",
                     help="serve a model over HTTP: OpenAI's and Anthropic's APIs, SGLang's /generate"),
    "dynamo": Command(module="penstock.dynamo.command", model="needed", takes="worker",
                      help="serve a model as a worker of NVIDIA Dynamo; also as the command penstock-dynamo"),
    "chat": Command(module="penstock.cli.commands", model="optional",
                    help="talk to a model in the terminal, or to a running server"),
    "generate": Command(module="penstock.cli.commands", model="needed",
                        help="continue one prompt and exit"),
    "bench": Command(module="penstock.bench.main", model="optional",
                     help="measure speed: offline, or of a running server"),
    "bench agentx": Command(module="penstock.bench.agentx", model="none",
                            help="run agent sessions on a running server: hit rates, latencies, tokens/s"),
    "bench rates": Command(module="penstock.bench.rates", model="needed", resolves=False,
                           help="measure this machine's speeds, for plan --rates"),
    "eval": Command(module="penstock.eval.main", model="optional",
                    help="measure answers: recall, needles, a text's perplexity, GSM8K"),
    "plan": Command(module="penstock.plan.main", model="optional", resolves=False,
                    help="simulate engines on a trace: hit rates, latencies, tokens/s"),
    "sim": Command(module="penstock.sim.main", model="none",
                   help="test the scheduler (the engine's planner) with simulated ranks and injected faults"),
    "store": Command(module="penstock.cli.store", model="none",
                     help="list, verify, sweep or purge what --kv-storage has stored"),
    "doctor": Command(module="penstock.cli.doctor", model="optional", own_flags=False, takes="all",
                      help="show this machine and the chosen back-ends, and why"),
}


def usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    return "\n".join([
        "usage: penstock COMMAND ...", "",
        "Serves long-context language models; their KV cache is in GPU memory, CPU memory and storage.", "",
        *(f"  {name:{width}}{c.help}" for name, c in COMMANDS.items()), "",
        "  penstock COMMAND --help   flags of one command",
        "  penstock --version        the version"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code; 2 is a wrong usage or config."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except ConfigError as e:
        for line in str(e).splitlines():
            print(f"penstock: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left (`penstock ... | head`); nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def dynamo() -> int:
    """`penstock-dynamo ...` is `penstock dynamo ...`."""
    return main(["dynamo", *sys.argv[1:]])


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"penstock {version()}")
        return 0
    name = next((two for two in (" ".join(words[:2]),) if two in COMMANDS), words[0])
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, list(COMMANDS), 1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(COMMANDS)}"
        raise ConfigError(f"{name!r} is not a command: {hint}")
    return _run(name, COMMANDS[name], words[len(name.split()):])


def _run(name: str, command: Command, words: list[str]) -> int:
    found = parsed(name, words)
    return 0 if found is None else int(importlib.import_module(command.module).run(*found))


def parsed(name: str, words: Sequence[str]) -> tuple[Config | None, argparse.Namespace] | None:
    """Return the resolved settings of a command line and what else it says; None: it has printed what was asked.
    Raises ConfigError."""
    from dataclasses import replace

    from penstock.config.base.machine import limit_libraries, probe
    from penstock.config.settings.cli import Parser, add_flags, config_from, flags, prepare
    from penstock.config.settings.file import FLAG, FromFile
    from penstock.config.settings.resolve import lines, of_torchrun, resolve
    from penstock.config.settings.tree import FRONTEND_ONLY, SERVE_ONLY

    command = COMMANDS[name]
    parser = Parser(prog=f"penstock {name}", description=command.help)
    without = {"all": frozenset[str](), "worker": FRONTEND_ONLY, "library": SERVE_ONLY}[command.takes]
    if command.own_flags:
        importlib.import_module(command.module).add_arguments(parser)
    own = frozenset(parser.spellings)
    file = FromFile(words if command.model != "none" else (), environment=name in ("serve", "dynamo"))
    if command.model != "none":
        add_flags(parser, model_required=command.model == "needed", without=without)
        parser.add_argument("--print-config", action="store_true",
                            help="print the resolved config, one `name value` a line, and exit")
        parser.add_argument(FLAG, metavar="FILE", help="YAML file whose keys are flags without -- in front; the "
                            "command line wins")
        with file.blaming():
            words = prepare(file.words, own)
    config = None
    with file.blaming():
        args = parser.parse(words)
        args.command = name
        if command.model != "none" and not args.model:
            args.model = file.model
        if command.model == "needed" or getattr(args, "model", None):
            raw = config_from(args)
            if command.takes == "worker":               # whose prefill instances a router names
                raw = replace(raw, server=replace(raw.server, router_dialect="sglang"))
            config = raw if not command.resolves else resolve(
                raw if command.takes == "library" else of_torchrun(raw), probe())
            limit_libraries(config.device.debug_cpu_isa)
            if args.print_config:
                print("\n".join(lines(config, without=without)))
                return None
        elif command.model == "optional":
            for flag in flags():
                if hasattr(args, flag.dest):
                    raise ConfigError(f"{flag.spellings[0]} needs a MODEL")
    return config, args


if __name__ == "__main__":
    sys.exit(main())
