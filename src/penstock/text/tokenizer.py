"""Text to token ids and back, and what a chat needs to know about tokens. No torch, no template engine.

Owns the choice of the tokenizer's file and the facts around it: end-of-answer ids, special tokens, the chat
template's text, the exact bytes of a token. Text that comes token by token is `detokenize`'s.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from penstock.config.base.errors import ConfigError, RequestError, cut, show
from penstock.model.weights.files import read_bytes, read_json_object, read_text
from penstock.model.weights.gguf_config import gguf_eos_ids
from penstock.model.weights.gguf_file import read_gguf_header
from penstock.model.weights.locate import OTHER_TOKENIZERS, ModelFiles, hub_snapshot
from penstock.text.gguf_tokenizer import library_errors, tokenizer_of_gguf
from penstock.text.tools.formats import harmony
from penstock.text.vocabulary.added import add_tokens
from penstock.text.vocabulary.tiktoken import ALPHABET, tokenizer_of_tiktoken

_TOKENIZER_BYTES_MAX = 256 << 20
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def open_tokenizer(files: ModelFiles, override: str | None = None) -> Tokenizer | None:
    """The model's tokenizer, or the one at `override` (folder, tokenizer.json, .gguf, cached hub id).

    Returns None when the model has none: it then serves token ids. Raises ConfigError when there is
    one that is damaged, or of a kind that is not supported.
    """
    path = files.tokenizer
    if override is not None:
        path = _path_of(override)
    if path is None:
        return None
    if path.suffix.lower() == ".json":
        return _from_json(path, files.eos_ids)
    own = path == files.gguf
    metadata = files.gguf_header.metadata if own else read_gguf_header(path).metadata
    return _from_gguf(metadata, str(path), files.eos_ids)


class Tokenizer:
    """A tokenizer and its model's conventions. Immutable after it is made; safe to share by threads.

    raw            the `tokenizers.Tokenizer`
    eos_ids        ids that end an answer: the model's and the tokenizer's
    special_ids    ids that decode to nothing with skip_special
    chat_template  Jinja source, or None
    tool_template  another one, for conversations with tools, or None
    template_vars  'bos_token', 'eos_token', ... as text, for the template
    byte_level     whether a text is just the bytes of its tokens, joined
    """

    def __init__(self, raw: tokenizers.Tokenizer, *, eos_ids: tuple[int, ...],
                 chat_template: str | None, template_vars: dict[str, str],
                 tool_template: str | None = None) -> None:
        # A file may ask for cut or padded prompts; neither is ever wanted here.
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw
        self.vocab_size: int = raw.get_vocab_size()
        self._bytes: dict[int, bytes] = {}
        self._added = {i: t.content for i, t in raw.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(i for i, t in raw.get_added_tokens_decoder().items() if t.special)
        self.chat_template, self.tool_template = chat_template, tool_template
        self.template_vars = template_vars
        own_eos = raw.token_to_id(template_vars["eos_token"]) if "eos_token" in template_vars else None
        self.eos_ids = _harmony_ends(raw, dict.fromkeys((*eos_ids, *(() if own_eos is None else (own_eos,)))))
        self._alphabet = _byte_alphabet(raw)
        state = json.loads(raw.decoder.__getstate__()) if raw.decoder is not None else {}
        self.byte_level = state.get("type") == "ByteLevel"     # alone: a Sequence does more to it

    def mark_id(self, text: str) -> int | None:
        """Return the id of the token that is all of `text` and stands for nothing else: special, or added in the
        form of
        <...>."""
        token = self.raw.token_to_id(text)
        marks = token in self.special_ids or (text[:1] == "<" and text[-1:] == ">")
        return token if token in self._added and marks else None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`; `add_special` adds what the model expects around a prompt (often BOS).

        Special tokens spelled out in `text` become their ids. Raises RequestError: lone surrogates,
        or a text that the tokenizer's pattern exhausts its engine at.
        """
        valid_unicode(text)
        try:
            # Unlike `encode`, it computes no offsets and releases the interpreter's lock.
            return self.raw.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:           # a Rust panic is no Exception
            raise gave_up(f"{type(e).__name__}: {e}") from None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; ids past the vocabulary (padding rows of the head) are left out."""
        return self.raw.decode(list(ids), skip_special_tokens=skip_special)

    def token_text(self, token: int) -> str:
        """What one token stands for, alone: half a character shows as U+FFFD. '' for no token."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes that one token adds to the text; b'' for an id outside the vocabulary."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes_of(token)
            if found:                       # so there are at most as many as tokens
                self._bytes[token] = found
        return found

    def _bytes_of(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return added.encode()
        piece = self.raw.id_to_token(token) if 0 <= token < 1 << 32 else None
        if piece is None:
            return b""
        if self._alphabet == "byte-level":
            return b"".join(BYTE_OF[c] if c in BYTE_OF else c.encode() for c in piece)
        if self._alphabet == "byte-fallback" and len(piece) == 6 and piece.startswith("<0x"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return (piece.replace("▁", " ") if self._alphabet else piece).encode()


def valid_unicode(text: str) -> None:
    """Raises RequestError on lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("the text is not valid Unicode: it holds half of a surrogate pair") from None


def gave_up(why: str) -> RequestError:
    """The error of a text that the tokenizer fails at, which is its fault and not the text's."""
    return RequestError(f"the model's tokenizer gives up at this text ({cut(why)}): send token ids", "prompt")


def _harmony_ends(raw: tokenizers.Tokenizer, eos_ids: Iterable[int]) -> tuple[int, ...]:
    """Return the ids that end an answer: in a vocabulary of `harmony` those of an answer and of a call, and never that
    of a message, whatever the files say."""
    marks = (harmony.RETURN, harmony.CALL, harmony.END, harmony.CHANNEL)
    found = [i for m in marks if (i := raw.token_to_id(m)) is not None]
    if len(found) < len(marks):
        return tuple(eos_ids)
    return tuple(i for i in dict.fromkeys((*eos_ids, *found[:2])) if i != found[2])


BYTE_OF = {spelled: bytes([b]) for b, spelled in enumerate(ALPHABET)}


def _byte_alphabet(raw: tokenizers.Tokenizer) -> str:
    """How pieces spell bytes: 'byte-level', 'byte-fallback', 'spaces' (only U+2581) or '' (plain)."""
    decoder = raw.decoder
    text = "" if decoder is None else decoder.__getstate__().decode()
    if '"ByteLevel"' in text:
        return "byte-level"
    if '"ByteFallback"' in text:
        return "byte-fallback"
    return "spaces" if '"Metaspace"' in text or "▁" in text else ""


def _path_of(override: str) -> Path:
    path = Path(override).expanduser()
    if not path.exists():
        path = hub_snapshot(override)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.exists() and not (path.parent / "tiktoken.model").exists():
            raise ConfigError(f"tokenizer {show(override)}: there is no tokenizer.json in "
                              f"{path.parent}")
    if path.suffix.lower() not in (".json", ".gguf"):
        raise ConfigError(f"tokenizer {show(override)}: expected a folder with tokenizer.json, that "
                          "file, or a .gguf file")
    return path


def _from_json(path: Path, eos_ids: tuple[int, ...]) -> Tokenizer:
    tiktoken = path.parent / "tiktoken.model"
    config = _optional_json(path.parent / "tokenizer_config.json")
    if not path.exists() and not tiktoken.exists():
        kinds = [name for name in OTHER_TOKENIZERS if (path.parent / name).exists()]
        if kinds == ["tekken.json"]:
            raise ConfigError(f"{path.parent}: has tekken.json but no tokenizer.json: add the tokenizer.json "
                              "of the same model in transformers' form, or give its folder with --tokenizer")
        raise ConfigError(f"{path.parent}: has {', '.join(kinds)} but no tokenizer.json; convert it with "
                          "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)")
    if path.exists():
        data = read_bytes(path, _TOKENIZER_BYTES_MAX)
        with library_errors(str(path)):
            raw = tokenizers.Tokenizer.from_buffer(data)
    else:
        raw = tokenizer_of_tiktoken(tiktoken, config)
    add_tokens(raw, path.parent, config)
    with library_errors(str(path)):
        # Some faults show only in use: an unknown-token that is not in the vocabulary, for one.
        raw.decode(raw.encode("a 1\n\t\U0001f600é").ids)
    named = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    templates = _chat_templates(path.parent, config)
    return Tokenizer(raw, eos_ids=eos_ids, template_vars=named, chat_template=templates.get("default"),
                     tool_template=templates.get("tool_use"))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Read the templates by name: chat_template.jinja, with those of additional_chat_templates, else
    chat_template.json, else tokenizer_config.json. One without a name is "default"."""
    more = {path.stem: read_text(path)
            for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return {**more, "default": read_text(jinja)}
    if more:
        return more
    own_file = _optional_json(folder / "chat_template.json")
    value = own_file.get("chat_template", config.get("chat_template"))
    if isinstance(value, list):          # [{"name": ..., "template": ...}]
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        if {"default", "tool_use"} & {*named} and all(isinstance(t, str) for t in named.values()):
            return {str(name): str(template) for name, template in named.items()}
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{folder}: chat_template is {show(value)}; expected text or a list of named "
                          "templates with a 'default'")
    return {} if value is None else {"default": value}


def _from_gguf(metadata: dict[str, Any], where: str, eos_ids: tuple[int, ...]) -> Tokenizer:
    raw = tokenizer_of_gguf(metadata, where)
    named = {}
    for name in ("bos", "eos", "unknown", "padding"):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        text = raw.id_to_token(token) if type(token) is int and 0 <= token < 1 << 32 else None
        if text is not None:
            named[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = text
    template, with_tools = (metadata.get(f"tokenizer.chat_template{end}") for end in ("", ".tool_use"))
    for given in (template, with_tools):
        if given is not None and not isinstance(given, str):
            raise ConfigError(f"{where}: tokenizer.chat_template is not text")
    return Tokenizer(raw, eos_ids=tuple(dict.fromkeys((*eos_ids, *gguf_eos_ids(metadata, where)))),
                     chat_template=template, template_vars=named, tool_template=with_tools)
