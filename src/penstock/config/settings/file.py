"""Flags from a YAML file, as vLLM's and SGLang's --config, and from the environment: the flag without its dashes.

Owns how they are read and which of them count: the command line wins, then the environment. What a flag means is
`cli`'s.
"""
from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.config.base import old_flags as old
from penstock.config.base.errors import ConfigError, show
from penstock.config.settings.cli import MODEL_SPELLINGS, flags, spelled

FLAG = "--config"
BYTES_MAX = 1 << 20
# With ARG as llama.cpp has it: of a Kubernetes service that is called penstock, every pod has a $PENSTOCK_PORT.
PREFIX = "PENSTOCK_ARG_"
SWITCHES = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


class FromFile:
    """The words of a command line with those of its file, if it names one, and of the environment.

    words   of the file first, then of the environment, then the others: the last one of a flag counts. Keys whose
            flag comes later are left out, so that the later one wins for lists as well
    model   that the environment or the file names, None without one
    """

    def __init__(self, argv: Sequence[str], *, environment: bool = False) -> None:
        """environment: whether that is read. Raises ConfigError: no such file, not YAML, a key twice, a value that no
        flag has, a variable of no flag, two of one."""
        self.words, self.model = list(argv), None
        self._keys, self._variables = dict[str, str](), dict[str, str]()       # by field of a flag
        self._path = self._take_path()
        given = {_field(spelled(word)) for word in self.words if word.startswith("-")}
        if environment:
            self.words = [*self._of_environment(given), *self.words]
            given |= self._variables.keys()
        if self._path is None:
            return
        own: list[str] = []
        for key, value in self._read(self._path):
            name = _flag(key)
            with self._blamed(key):
                if name == FLAG:
                    raise ConfigError("a file names no other file: leave it out")
                if name in MODEL_SPELLINGS:
                    self.model = self.model or _text(value)
                elif _field(name) not in given:
                    own += _words(name, value)
                    self._keys[_field(name)] = key
        self.words = [*own, *self.words]

    def _of_environment(self, given: Collection[str]) -> Iterator[str]:
        known = {s for f in flags() for s in (*f.spellings, *f.inverse)}
        for variable, text in sorted(os.environ.items()):
            if not variable.startswith(PREFIX) or not text:
                continue
            name = _flag(variable.removeprefix(PREFIX).lower())
            if name in MODEL_SPELLINGS:
                self._note("model", variable)
                self.model = text
            elif name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean ${PREFIX}{near[0].lstrip('-').replace('-', '_').upper()}?" if near else (
                    "docs/reference/flags.md lists them")
                raise ConfigError(f"${variable}: {name} is not a flag: {hint}")
            elif (field := _field(name)) not in given:
                value: Any = text
                if any(f.dest == field and f.kind == "bool" for f in flags()):
                    if text.lower() not in SWITCHES:
                        raise ConfigError(f"${variable}={text}: 1 or 0 is needed")
                    value = SWITCHES[text.lower()]
                self._note(field, variable)
                yield from _words(name, value)

    def _note(self, field: str, variable: str) -> None:
        """Raises ConfigError: another variable is for the same flag."""
        if (other := self._variables.setdefault(field, variable)) != variable:
            raise ConfigError(f"${other}, ${variable}: both are for the same flag: set one of them")

    def _take_path(self) -> str | None:
        """Its value, taken out of the words. Raises ConfigError: twice, or without one."""
        found = [i for i, word in enumerate(self.words) if spelled(word) == FLAG]
        if not found:
            return None
        if len(found) > 1:
            raise ConfigError(f"{FLAG} is there twice: give one file")
        _, eq, path = self.words.pop(found[0]).partition("=")
        if not eq:
            path = self.words.pop(found[0]) if found[0] < len(self.words) else ""
        if not path:
            raise ConfigError(f"{FLAG}: a YAML file is needed, whose keys are flags")
        return path

    def _read(self, path: str) -> Iterator[tuple[str, Any]]:
        import yaml  # not for --help

        try:
            with open(path, encoding="utf-8") as file:
                text = file.read(BYTES_MAX + 1)
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"{FLAG} {path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None
        if len(text) > BYTES_MAX:
            raise ConfigError(f"{FLAG} {path}: more than {BYTES_MAX} bytes: not a file of flags")
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as e:
            said = " ".join(str(e).split())
            raise ConfigError(f"{FLAG} {path}: not YAML: {said[:300]}") from None
        if root is None:
            return
        pairs = root.value if isinstance(root, yaml.MappingNode) else None
        if pairs is None or not all(isinstance(key, yaml.ScalarNode) for key, _ in pairs):
            raise ConfigError(f"{FLAG} {path}: lines of `flag: value` are needed, without dashes")
        seen: set[str] = set()
        for key, node in pairs:
            if (field := _field(_flag(key.value))) in seen:
                raise ConfigError(f"{FLAG} {path}: {key.value}: its flag is there twice")
            seen.add(field)
            yield key.value, _value(node)

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Errors about a flag of the file name the file and the key as well, of the environment the variable."""
        try:
            yield
        except ConfigError as e:
            raise ConfigError("\n".join(map(self._blame, str(e).split("\n")))) from None

    @contextmanager
    def _blamed(self, key: str) -> Iterator[None]:
        try:
            yield
        except ConfigError as e:
            raise ConfigError(f"{FLAG} {self._path}: {key}: {e}") from None

    def _blame(self, line: str) -> str:
        named = re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", line.partition(": ")[0])
        fields = dict.fromkeys(_field(spelled(name)) for name in named)
        parts = [f"${self._variables[f]}" for f in fields if f in self._variables]
        if keys := [self._keys[f] for f in fields if f in self._keys]:
            parts.append(f"{FLAG} {self._path}: {', '.join(dict.fromkeys(keys))}")
        return f"{', '.join(parts)}: {line}" if parts else line


def _flag(key: str) -> str:
    """`max_model_len` is --max-model-len; `ngl`, which has one dash, -ngl."""
    key = key.lstrip("-")
    short = "-" + key
    known = any(short in f.spellings for f in flags()) or short in MODEL_SPELLINGS
    return short if known and not any("-" + short in f.spellings for f in flags()) else spelled("--" + key)


def _field(name: str) -> str:
    """What two spellings of one setting have in common: its place in the tree, else the spelling."""
    name = old.SIZE if name in old.FORMS else old.renamed(name)
    positive = "--" + name[5:] if name.startswith("--no-") else name
    for flag in flags():
        if {name, positive} & {*flag.spellings, *flag.inverse}:
            return flag.dest
    return positive


def _value(node: Any) -> Any:
    """None, True and False of YAML 1.2 as such, other scalars as they are typed, lists and objects."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        if node.style is not None:              # quoted
            return node.value
        return {"true": True, "false": False, "null": None, "~": None, "": None}.get(
            node.value.lower(), node.value)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(n, yaml.ScalarNode) for n in node.value):
        return [_value(n) for n in node.value]
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except yaml.YAMLError as e:
        raise ConfigError(f"{FLAG}: not YAML: {' '.join(str(e).split())[:300]}") from None


def _words(name: str, value: Any) -> list[str]:
    """Return the words of the command line for one key. Raises ConfigError."""
    if value is None:                           # as if it were not there
        return []
    if isinstance(value, bool):
        positive = next((f for f in flags() if name in (*f.spellings, *f.inverse)), None)
        if positive is not None and positive.kind != "bool":
            return [f"{name}={_text(value)}"]
        if positive is not None and not value and name in positive.inverse:
            return [positive.spellings[0]]
        return [name] if value else [f"--no-{name.lstrip('-')}"]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [f"{name}={','.join(value)}"] if name.startswith("--") else [name, ",".join(value)]
    text = _text(value)
    return [f"{name}={text}"] if name.startswith("--") else [name, text]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{show(value)}: JSON has no such value") from None
