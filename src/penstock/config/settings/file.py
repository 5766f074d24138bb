"""Flags from a YAML file, as vLLM's and SGLang's --config: a key is a flag without its dashes.

Owns how a file is read and which of its keys the command line leaves over. What a flag means is `cli`'s.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.config.base import old_flags as old
from penstock.config.base.errors import ConfigError, show
from penstock.config.settings.cli import MODEL_SPELLINGS, flags, spelled

FLAG = "--config"
BYTES_MAX = 1 << 20


class FromFile:
    """The words of a command line with those of its file, if it names one.

    words   of the file first, then the others: the last one of a flag counts. Keys whose flag the command
            line has are left out, so that it wins for lists as well
    model   that the file names, None without one
    """

    def __init__(self, argv: Sequence[str]) -> None:
        """Raises ConfigError: no such file, not YAML, a key twice, a value that no flag has."""
        self.words, self.model, self._keys = list(argv), None, dict[str, str]()
        self._path = self._take_path()
        if self._path is None:
            return
        given = {_field(spelled(word)) for word in self.words if word.startswith("-")}
        own: list[str] = []
        for key, value in self._read(self._path):
            name = _flag(key)
            with self._blamed(key):
                if name == FLAG:
                    raise ConfigError("a file names no other file: leave it out")
                if name in MODEL_SPELLINGS:
                    self.model = _text(value)
                elif _field(name) not in given:
                    own += _words(name, value)
                    self._keys[_field(name)] = key
        self.words = [*own, *self.words]

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
        """Errors about a flag of the file name the file and the key as well."""
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
        keys = dict.fromkeys(self._keys[f] for name in named if (f := _field(spelled(name))) in self._keys)
        return f"{FLAG} {self._path}: {', '.join(keys)}: {line}" if keys else line


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
