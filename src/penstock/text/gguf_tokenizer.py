"""A `tokenizers.Tokenizer` from the metadata of a GGUF file.

Owns the pre-tokenisers and the conversion of SentencePiece scores to merges; a model or pre-tokeniser that is
not listed here is refused by name, because guessing gives wrong ids silently.
"""
from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from penstock.config.base.errors import ConfigError, show
from penstock.text.vocabulary.patterns import (
    DEEPSEEK_V3,
    GPT4O,
    KIMI,
    LLAMA3,
    QWEN2,
    QWEN35,
    TEKKEN,
    split_by,
)

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_PIECE_CHARS_MAX = 512               # splitting a piece is quadratic in it; real ones have up to 64

# By `tokenizer.ggml.pre`: the patterns, whether a whole piece that is a token is not merged, whether text is
# composed first, as the models' own tokenizer.json say. "smollm" and "gpt-2" split by GPT-2's own pattern.
_SPLITS: dict[str, tuple[tuple[str, ...], bool, bool]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), ((LLAMA3,), True, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), ((QWEN2,), False, True)),
    "qwen35": ((QWEN35,), False, True),
    **dict.fromkeys(("glm4", "glm5"), ((LLAMA3,), True, False)), "chatglm-bpe": ((LLAMA3,), False, False),
    "gpt-4o": ((GPT4O,), True, False), "tekken": ((TEKKEN,), True, False),
    "deepseek-v3": (DEEPSEEK_V3, False, False), "kimi-k2": ((KIMI,), True, False)}
_STARTS = ("llama-bpe", "llama3", "llama-v3", "tekken")     # begin with BOS unless the file says otherwise


@contextmanager
def library_errors(where: str) -> Iterator[None]:
    """Whatever the library raises is about the file `where`: ConfigError, in one line."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:      # it raises bare Exceptions, and a Rust panic is not even one
        raise ConfigError(f"{where}: not a tokenizer that works: {show(str(e))}") from None


def tokenizer_of_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that `metadata` describes, with its special tokens and its BOS / EOS rule.

    Raises ConfigError: an unknown tokenizer model or pre-tokeniser, missing or inconsistent arrays.
    """
    kind = metadata.get("tokenizer.ggml.model")
    makers: dict[Any, Callable[[_Vocabulary], Tokenizer]] = {"gpt2": _byte_level,
                                                             "llama": _sentencepiece}
    if not isinstance(kind, str) or kind not in makers:
        raise ConfigError(f"{where}: tokenizer model {show(kind)} is not supported; gpt2 and llama are. "
                          "Give --tokenizer a folder with tokenizer.json")
    vocabulary = _Vocabulary(metadata, where)
    with library_errors(where):
        tokenizer = makers[kind](vocabulary)
        added = [AddedToken(token, special=t != _USER_DEFINED, normalized=False)
                 for token, t in zip(vocabulary.tokens, vocabulary.types, strict=True)
                 if t in (_CONTROL, _USER_DEFINED)]
        tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != len(vocabulary.tokens):
        raise ConfigError(f"{where}: its vocabulary of {len(vocabulary.tokens)} tokens makes a tokenizer "
                          f"of {tokenizer.get_vocab_size()}")
    _set_post_processor(tokenizer, vocabulary, kind)
    return tokenizer


class _Vocabulary:
    """The arrays of the metadata, checked against each other."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where
        self.tokens: list[str] = self._get("tokens", list, [])
        types: Any = self._get("token_type", array, array("i", [1] * len(self.tokens)))
        if not self.tokens or len(types) != len(self.tokens):
            raise ConfigError(f"{where}: {len(self.tokens)} tokens and {len(types)} token types")
        self.types: list[int] = list(types)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise ConfigError(f"{where}: a token is in the vocabulary twice")
        if "" in self.ids:
            raise ConfigError(f"{where}: token {self.ids['']} is empty")

    def _get(self, key: str, kind: type, default: Any) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if type(value) is not kind:
            raise ConfigError(f"{self.where}: tokenizer.ggml.{key} has a wrong type")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._get(key, bool, default)
        return value

    def strings(self, key: str) -> list[str]:
        value: list[str] = self._get(key, list, [])
        return value

    def scores(self) -> array[float]:
        value: array[float] = self._get("scores", array, array("f"))
        if len(value) != len(self.tokens):
            raise ConfigError(f"{self.where}: {len(self.tokens)} tokens and {len(value)} scores")
        return value

    def special(self, name: str) -> int | None:
        """The id of the bos, eos or unknown token; None where there is none."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < len(self.tokens)):
            raise ConfigError(f"{self.where}: {name}_token_id {show(value)} is not in the vocabulary of "
                              f"{len(self.tokens)} tokens")
        return value


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    pre = vocabulary.metadata.get("tokenizer.ggml.pre")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    gpt2 = {"smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]),
            "gpt-2": plain}
    if not isinstance(pre, str) or pre not in (*gpt2, *_SPLITS):
        known = ", ".join((*gpt2, *_SPLITS))
        raise ConfigError(f"{vocabulary.where}: pre-tokeniser {show(pre)} is not supported; {known} are. "
                          "Give --tokenizer a folder with tokenizer.json")
    patterns, ignore_merges, composed = _SPLITS.get(pre, ((), False, False))
    merges = []
    for merge in vocabulary.strings("merges"):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise ConfigError(f"{vocabulary.where}: {show(merge)} is not a merge of two tokens")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges,
                                     ignore_merges=ignore_merges))
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split_by(*patterns) if patterns else gpt2[pre]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece's BPE: the pair whose piece scores best merges first; unknown text becomes bytes."""
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if vocabulary.metadata.get(f"tokenizer.ggml.{key}"):
            raise ConfigError(f"{vocabulary.where}: a SentencePiece tokenizer with {key} is not supported")
    unknown = vocabulary.special("unknown")
    prefix = vocabulary.flag("add_space_prefix", True)
    tokenizer = Tokenizer(models.BPE(
        vocab=vocabulary.ids, merges=_merges_of_scores(vocabulary), byte_fallback=True, fuse_unk=True,
        unk_token=None if unknown is None else vocabulary.tokens[unknown]))
    spaces: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                           decoders.Fuse(), *strip])
    return tokenizer


def _merges_of_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best score of the whole first."""
    scores, ids = vocabulary.scores(), vocabulary.ids
    # Control, unknown and byte tokens never come out of a merge, nor go into one.
    normal = [t not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE) for t in vocabulary.types]
    found: list[tuple[float, int, int, str, str]] = []
    for i, piece in enumerate(vocabulary.tokens):
        if not normal[i]:
            continue
        if len(piece) > _PIECE_CHARS_MAX:
            raise ConfigError(f"{vocabulary.where}: token {i} has {len(piece)} characters; at most "
                              f"{_PIECE_CHARS_MAX} are expected")
        if scores[i] != scores[i]:
            raise ConfigError(f"{vocabulary.where}: the score of token {i} is not a number")
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None and normal[left] and normal[right]:
                found.append((-scores[i], left, right, piece[:cut], piece[cut:]))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _set_post_processor(tokenizer: Tokenizer, vocabulary: _Vocabulary, kind: str) -> None:
    pre = vocabulary.metadata.get("tokenizer.ggml.pre")
    # The defaults of llama.cpp where the file does not say.
    starts = vocabulary.flag("add_bos_token", kind == "llama" or pre in _STARTS)
    ends = vocabulary.flag("add_eos_token", False)
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    tokens = {name: token for name, token in (("bos", bos if starts else None),
                                              ("eos", eos if ends else None)) if token is not None}
    if tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["bos"] * ("bos" in tokens) + ["$A"] + ["eos"] * ("eos" in tokens),
            special_tokens=list(tokens.items()))
