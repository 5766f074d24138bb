"""Patterns by which byte-level tokenizers split text before they merge, by family."""
from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (_ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES)
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# o200k: words split where capitals begin.
GPT4O = (f"{_HEAD}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_HEAD}{_UPPER}+{_LOWER}*{_ENDINGS}?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES)
TEKKEN = (f"{_HEAD}{_UPPER}*{_LOWER}+|{_HEAD}{_UPPER}+{_LOWER}*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES)
# Kimi: Chinese characters apart from other words.
_UPPER_K, _LOWER_K = _UPPER[:-1] + r"&&[^\p{Han}]]", _LOWER[:-1] + r"&&[^\p{Han}]]"
KIMI = (r"[\p{Han}]+" f"|{_HEAD}{_UPPER_K}*{_LOWER_K}+{_ENDINGS}?|{_HEAD}{_UPPER_K}+{_LOWER_K}*{_ENDINGS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES)
# DeepSeek-V3 splits three times: numbers, Chinese and Japanese, the rest.
DEEPSEEK_V3 = (
    r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES)


def split_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokeniser of byte-level pieces, split by each of `patterns` in turn."""
    return pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
