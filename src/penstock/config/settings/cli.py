"""The command line, generated from the config tree: one flat flag per field, aliases included.

Owns spellings, number formats and the messages about them; knows no default and no meaning: those
are in `tree.py`. The library's keyword arguments go through the same table (`from_options`).
"""
from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from penstock.config.base import old_flags as old
from penstock.config.base.errors import ConfigError
from penstock.config.base.sizes import parse_bytes, show_bytes
from penstock.config.settings import peers, sglang
from penstock.config.settings.tree import Alias, Bytes, Config, HostSize, Inverse, Unlisted
from penstock.config.settings.unbuilt import ALWAYS, find_unbuilt

SECTIONS = {
    "model": "model and weights",
    "kv": "KV cache: GPU, host memory, storage",
    "schedule": "scheduling",
    "device": "device and parallelism",
    "server": "HTTP server",
    "pair": "prefill/decode (PD) disaggregation",
    "nodes": "several machines",
    "cluster": "between processes and machines",
    "debug": "debugging",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One field of the tree as a flag. `kind` is the type's name; `spellings[0]` is ours."""

    section: str
    name: str
    kind: Literal["str", "int", "float", "bytes", "bool", "list", "host"]
    spellings: tuple[str, ...]
    inverse: tuple[str, ...]            # spellings that mean False
    choices: tuple[str, ...]
    listed: tuple[str, ...]             # those that help names
    default: Any
    required: bool
    help: str

    @property
    def dest(self) -> str:
        return f"{self.section}.{self.name}"


@cache
def flags() -> tuple[Flag, ...]:
    """Every flag, in the order of the tree."""
    return tuple(_flags())


def _flags() -> Iterator[Flag]:
    for section, cls in get_type_hints(Config).items():
        hints = get_type_hints(cls, include_extras=True)
        for f in fields(cls):
            base, *meta = get_args(hints[f.name])
            base = next((t for t in get_args(base) if get_origin(t) is Literal), base)   # of X | None
            choices = get_args(base) if get_origin(base) is Literal else ()
            unlisted = [name for a in meta if isinstance(a, Unlisted) for name in a.names]
            yield Flag(
                section=section, name=f.name, kind=_kind(base, meta),
                spellings=("--" + f.name.replace("_", "-"),
                           *(n for a in meta if isinstance(a, Alias) for n in a.names)),
                inverse=tuple(n for a in meta if isinstance(a, Inverse) for n in a.names),
                choices=choices, listed=tuple(c for c in choices if c not in unlisted),
                default=None if f.default is MISSING else f.default,
                required=f.default is MISSING and f.default_factory is MISSING,
                help=next(a for a in meta if isinstance(a, str)))


def _kind(base: Any, meta: list[Any]) -> Any:
    if any(isinstance(a, Bytes) for a in meta):
        return "bytes"
    if any(isinstance(a, HostSize) for a in meta):
        return "host"
    if get_origin(base) is Literal:
        return "str"
    if get_origin(base) is tuple:
        return "list"
    plain = [t for t in get_args(base) or (base,) if t is not type(None)]
    assert len(plain) == 1 and plain[0] in (str, int, float, bool), f"no flag form for {base}"
    return plain[0].__name__


def parse_value(flag: Flag, text: str) -> Any:
    """The field's value for what was typed. Raises ConfigError that names the spelling's flag."""
    own = flag.spellings[0]
    text = peers.parser(flag.name, own, text)
    if flag.choices and text not in flag.choices:
        raise ConfigError(f"{own} {text}: choose from {', '.join(flag.listed)}")
    if flag.kind in ("bytes", "host"):
        try:
            return parse_bytes(text) if flag.kind == "bytes" else old.size_of(text)
        except ConfigError as e:
            raise ConfigError(f"{own}: {e}") from None
    if flag.kind == "list":
        return tuple(part for part in text.split(",") if part)
    if flag.kind in ("int", "float"):
        try:
            return int(text) if flag.kind == "int" else float(text)
        except ValueError:
            what = "a whole number" if flag.kind == "int" else "a number"
            raise ConfigError(f"{own} {text}: {what} is needed") from None
    return text


SIMILAR = 0.75          # of two spellings, as difflib counts, from which on one is proposed for the other


class Parser(argparse.ArgumentParser):
    """argparse without prefix guessing, whose errors are ConfigError and suggest a spelling."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(**kwargs)
        self.elsewhere: frozenset[str] = frozenset()    # spellings that only `serve` takes

    @property
    def spellings(self) -> frozenset[str]:
        """Return the spellings of the flags that it has so far."""
        return frozenset(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """argparse's messages in our form: what was given, then what is needed."""
        message = message.removeprefix("argument ")
        message = re.sub(r": invalid (int|float) value: '(.*)'", lambda m: (
            f" {m[2]}: a {'whole ' * (m[1] == 'int')}number is needed"), message)
        message = message.replace("expected one argument", "a value is needed")
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses all of `argv`. Raises ConfigError; an unknown flag names its nearest match."""
        args, unknown = self.parse_known_args(list(argv))
        for text in unknown:
            if (name := text.split("=")[0]) in self.elsewhere:
                raise ConfigError(f"{name} is a flag of penstock serve: {self.prog} has no use "
                                  "for it, leave it out")
        for text in unknown:
            if not text.startswith("-"):
                if NAMES in argv:       # as `prepare` leaves it where MODEL comes later
                    raise ConfigError(f"{text!r} is one argument too many: put MODEL first, or give it by "
                                      f"--model, where {NAMES} has several names")
                raise ConfigError(f"{text!r} is one argument too many (see {self.prog} --help)")
            name = spelled(text)
            known = [*self._option_string_actions, *_valued() - {*old.FORMS}, *ALWAYS, *SWITCHES]
            raise ConfigError(f"{text.split('=')[0]} is not a flag of {self.prog}: "
                              + _hint(name, known, f"see {self.prog} --help"))
        return args

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """No flag is guessed: `-tb` is not `-t b`."""
        return []


def _hint(name: str, known: Iterable[str], otherwise: str) -> str:
    """The nearest spelling that is taken, where it is near enough and does not mean the opposite."""
    same = [s for s in known if s.startswith("--") and _turns_off(s) == _turns_off(name)]
    near = difflib.get_close_matches(name, same, 1, SIMILAR)
    return f"did you mean {near[0]}?" if near else otherwise


def _turns_off(name: str) -> bool:
    return name.startswith(("--no-", "--disable-"))


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # `--a, --b SIZE` instead of argparse's `--a SIZE, --b SIZE`.
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return ", ".join(action.option_strings) + " " + value


def add_flags(parser: Parser, *, model_required: bool = True,
              without: Collection[str] = ()) -> None:
    """Adds MODEL and the flags of the tree, one help group per section; those `without`, as
    "section.field", are refused as flags of `serve`."""
    parser.usage = f"{parser.prog} {'MODEL' if model_required else '[MODEL]'} [flags]"
    parser.epilog = ("SIZE is bytes unless a flag says GiB, or has K, M, G, T or KiB to TiB (powers of 1,024), or KB, "
                     "MB, GB, TB (powers of 1,000). Flags of other engines whose feature is not built are refused by "
                     "name: docs/reference/flags.md lists them.")
    # Optional for argparse: `config_from` says it better when it is missing.
    parser.add_argument("model", nargs="?", metavar="MODEL",
                        help="folder, .gguf file, hub id, or 'demo'")
    groups = {s: parser.add_argument_group(title) for s, title in SECTIONS.items()}
    for flag in flags():
        if flag.dest != "model.model" and flag.dest not in without:
            _add(groups[flag.section], flag)
    parser.elsewhere = frozenset(
        spelling for flag in flags() if flag.dest in without for spelling in flag.spellings)


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    # Values stay text until `config_from`: argparse would replace our messages by its own.
    if flag.kind == "bool":
        group.add_argument(*flag.spellings, dest=flag.dest, default=argparse.SUPPRESS,
                           help=f"{flag.help} (default: {'on' if flag.default else 'off'})",
                           action=argparse.BooleanOptionalAction)
        if flag.inverse:
            group.add_argument(*flag.inverse, dest=flag.dest, default=argparse.SUPPRESS,
                               action="store_false", help=f"same as --no-{flag.spellings[0][2:]}")
        return
    shown = show_bytes(flag.default) if flag.kind == "bytes" and flag.default else flag.default
    metavar = {"int": "N", "float": "X", "bytes": "SIZE", "list": "A,B", "host": "SIZE"}.get(
        flag.kind, flag.name.rpartition("_")[2].upper())
    group.add_argument(*flag.spellings, dest=flag.dest, default=argparse.SUPPRESS,
                       help=flag.help if shown in (None, ()) else f"{flag.help} (default: {shown})",
                       metavar="{" + ",".join(flag.listed) + "}" if flag.choices else metavar,
                       action="append" if flag.kind == "list" else "store")


MODEL_SPELLINGS = ("--model", "--model-path", "-m", "--hf-repo", "-hf", "-hfr")
NAMES = "--served-model-name"
SWITCHES = {sglang.ENABLE: "--host-decode=auto", "--disable-log-stats": "--log-stats-interval=0",
            "--enable-expert-parallel": "--ep=0", "--enable-ep-moe": "--ep=0", "--no-enable-expert-parallel": "--ep=1",
            **old.SWITCHED}
COLLECTED = (sglang.BACKEND, sglang.EXTRA, peers.ROPE, peers.SCALE, peers.ORIGINAL,      # several make one
             peers.OVERRIDES, peers.SGLANG_OVERRIDES, *old.FORMS)


def prepare(argv: Sequence[str], own: Collection[str] = ()) -> list[str]:
    """`argv` in our spelling: `_` in a flag's name becomes `-`, `--model X` becomes MODEL, plain
    numbers of a unit become sizes, peers' words for sparse decode, storage, RoPE and speculation ours, and
    their flags for what is not built are dropped when neutral.

    own: flags of the command itself, whatever they are elsewhere. Raises ConfigError for a flag whose feature
    is not built, naming the feature.
    """
    ours = {s for f in flags() for s in f.spellings}
    out: list[str] = []
    rest = list(argv)
    kept: dict[str, str] = {}
    # Else the word after a name is MODEL.
    model_first = bool(rest) and (rest[0][:1] != "-" or any(spelled(w) in MODEL_SPELLINGS for w in rest))
    while rest:
        word = rest.pop(0)
        if word == "--":
            rest.insert(0, word)
            break
        _, eq, value = word.partition("=")
        name = spelled(word)
        if name not in own:
            name = old.renamed(name)
        entry = None if name in own else find_unbuilt(name)
        if name in old.SWITCHES and not eq:
            kept[name] = ""
        elif name in SWITCHES and not eq:
            out.append(SWITCHES[name])
        elif name == NAMES and not eq and model_first and rest and rest[0][:1] != "-":
            while rest and not rest[0].startswith("-"):             # as vLLM takes several
                out.append(f"{NAMES}={rest.pop(0)}")
        elif name in ALWAYS:
            if value.lower() in ("false", "0"):
                raise ConfigError(f"{word}: cannot be turned off: {ALWAYS[name]}")
        elif name in _valued():
            if name in MODEL_SPELLINGS and not eq and not rest:
                raise ConfigError(f"{name}: a folder, a .gguf file, a hub id or 'demo' is needed")
            given = value if eq else rest.pop(0) if rest else ""
            if name in COLLECTED:
                kept[peers.OVERRIDES if name == peers.SGLANG_OVERRIDES else name] = given
            elif name == sglang.CONFIG and not any(spelled(w) == sglang.ENABLE for w in argv):
                raise ConfigError(f"{name}: give {sglang.ENABLE} as well, or our own flags")
            else:
                out += _translated(name, given)
        elif entry is None:
            out.append(name + eq + value if name.startswith("--") else word)
        else:
            taken = not (entry.switch or eq) and bool(rest) and not rest[0].startswith("--")
            entry.check(name, value if eq else rest[0] if taken else None)
            if name in ours:
                out.append(word)
            elif taken:
                rest.pop(0)
    stored = sglang.storage(kept.get(sglang.BACKEND), kept.get(sglang.EXTRA))
    if stored and any(word.partition("=")[0] == "--kv-storage" for word in out):
        raise ConfigError(f"{sglang.BACKEND}, --kv-storage: both say where pages are stored: give one")
    sized = any(word.partition("=")[0] == old.SIZE for word in out)
    return [*out, *stored, *peers.rope(kept), *old.offloading(kept, sized), *rest]


def spelled(word: str) -> str:
    """The name of a flag as its table has it: without a value, `-` for `_`."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


@cache
def _valued() -> frozenset[str]:
    """Spellings with a value that is rewritten."""
    return frozenset((*MODEL_SPELLINGS, *COLLECTED, sglang.CONFIG, *peers.TRANSLATED))


def _translated(name: str, value: str) -> list[str]:
    """Words of ours for a flag of `_valued`. Raises ConfigError."""
    if name in MODEL_SPELLINGS:
        return [value]
    if name == sglang.CONFIG:
        return sglang.sparse(value)
    return peers.TRANSLATED[name](name, value)


def config_from(args: argparse.Namespace) -> Config:
    """The raw config: what was typed, the tree's defaults elsewhere. Not resolved, not checked.

    Raises ConfigError when the model is missing.
    """
    if not args.model:
        raise ConfigError("MODEL is missing: a folder, a .gguf file, a hub id, or 'demo'")
    given: dict[str, dict[str, Any]] = {s: {} for s in SECTIONS}
    given["model"]["model"] = args.model
    for flag in flags():
        if hasattr(args, flag.dest):
            value = getattr(args, flag.dest)
            if flag.kind == "list":
                value = tuple(part for text in value for part in parse_value(flag, text))
            elif flag.kind != "bool":
                value = parse_value(flag, value)
            given[flag.section][flag.name] = value
    hints = get_type_hints(Config)
    return Config(**{section: hints[section](**values) for section, values in given.items()})


def from_options(model: str, options: Mapping[str, object], *,
                 without: Collection[str] = ()) -> Config:
    """The raw config for keyword arguments (`LLM(model, tensor_parallel_size=1)`): every spelling
    of the command line without its dashes, `_` for `-`. None means the default. `without` as in
    `add_flags`.

    Raises ConfigError as the command line does.
    """
    argv: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            argv.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, dict):
            argv.append(f"{flag}={json.dumps(value)}")
        elif isinstance(value, (list, tuple)):
            argv.append(f"{flag}={','.join(map(str, value))}")
        else:
            argv.append(f"{flag}={value}")
    parser = Parser(prog="LLM()" if without else "penstock", add_help=False)
    add_flags(parser, without=without)
    return config_from(parser.parse([*prepare(argv), "--", model]))
