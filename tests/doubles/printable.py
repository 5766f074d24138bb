"""A tokenizer of 96 ids for tiny models: printable ASCII, one character each, and an end."""
from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.exec.sampling.grammar import Vocabulary

CHARACTERS = " " + "".join(map(chr, range(33, 127)))
END = len(CHARACTERS)


def vocabulary() -> Vocabulary:
    raw = Tokenizer(models.BPE({"Ġ" if c == " " else c: i for i, c in enumerate(CHARACTERS)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return Vocabulary(raw.to_str(), (END,))


def text(ids: Sequence[int]) -> str:
    """Of an answer, without its end."""
    return "".join(CHARACTERS[i] for i in ids if i != END)
