"""Tokens that only the files beside tokenizer.json add, as transformers adds them."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from penstock.config.base.errors import ConfigError, show
from penstock.model.weights.files import read_json_object

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FIELDS = ("single_word", "lstrip", "rstrip", "normalized")


def add_tokens(raw: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """Add to `raw` what `config`, which is tokenizer_config.json, and the older files in `folder` add.

    These are `added_tokens_decoder`, or without it special_tokens_map.json and added_tokens.json, then the
    named special tokens and the additional ones. Raises ConfigError: a token of a wrong form.
    """
    where = str(folder / "tokenizer_config.json")
    own = raw.get_added_tokens_decoder()
    config = dict(config)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        older = _optional(folder / "special_tokens_map.json")
        extra = extra or older.get("extra_special_tokens") or older.get("additional_special_tokens") or []
        config |= {name: value for name, value in older.items() if name.endswith("_token")}
        special = {_text(config[name], where) for name in NAMED if config.get(name)}
        special |= {_text(t, where) for t in _values(extra, where)}
        found = {index: AddedToken(text, normalized=text not in special, special=text in special)
                 for text, index in _optional(folder / "added_tokens.json").items() if type(index) is int}
        found |= own
    else:
        found = _decoder(decoder, where)
    by_text = {str(token.content): token for token in found.values()}
    known = {repr(token) for token in own.values()}
    adding = [token for _, token in sorted(found.items()) if repr(token) not in known]
    texts = {str(token.content) for token in (*own.values(), *adding)}
    models = [v for name, v in config.items() if name.endswith("_token") and name not in NAMED
              and isinstance(v, str)]
    for value in (*(config.get(name) for name in NAMED), *_values(extra, where), *models):
        text = "" if value is None else _text(value, where)
        if text and text not in texts:
            texts.add(text)
            adding.append(by_text.get(text) or _token(value, where))
    if adding:
        named = {_text(config[name], where) for name in NAMED if config.get(name)}
        raw.add_tokens([_with_special(t) if t.content in named and not t.special else t for t in adding])


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _decoder(decoder: Any, where: str) -> dict[int, AddedToken]:
    if not isinstance(decoder, dict):
        raise ConfigError(f"{where}: added_tokens_decoder is {show(decoder)}; an object is needed")
    found = {}
    for index, value in decoder.items():
        if not index.isdecimal() or not isinstance(value, dict):
            raise ConfigError(f"{where}: added_tokens_decoder has {show(index)}: {show(value)}; an id and an "
                              "object with content are needed")
        found[int(index)] = _token(value, where, special=False)
    return found


def _values(extra: Any, where: str) -> list[Any]:
    """The additional special tokens: a list, or an object of names."""
    if isinstance(extra, dict):
        return list(extra.values())
    if not isinstance(extra, list):
        raise ConfigError(f"{where}: the additional special tokens are {show(extra)}; a list is needed")
    return extra


def _text(value: Any, where: str) -> str:
    found = value.get("content") if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise ConfigError(f"{where}: {show(value)} is not a token: a string or an object with content is one")
    return found


def _token(value: Any, where: str, *, special: bool = True) -> AddedToken:
    """Return the token that `value` describes; `special`: where it does not say so."""
    text = _text(value, where)
    if not isinstance(value, dict):
        return AddedToken(text, special=special)
    flags = {name: bool(value[name]) for name in _FIELDS if name in value}
    return AddedToken(text, special=bool(value.get("special", special)), **flags)


def _with_special(token: AddedToken) -> AddedToken:
    return AddedToken(token.content, special=True, **{name: getattr(token, name) for name in _FIELDS})
