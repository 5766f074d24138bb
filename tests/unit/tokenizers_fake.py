"""Small tokenizers with the decoders of real ones: byte-level, and byte-fallback with spaces."""
from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

EOS = "<|end|>"
CHATML = ("{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}")
# Ids that come after the alphabet: merges, then added tokens.
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ã", "©"), ("Ġ", "w")]
ADDED = [(EOS, True), ("<|start|>", True), ("<tool>", False)]


def byte_level() -> Tokenizer:
    """Every byte, a few merges (one is two bytes of one character), special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, *("".join(m) for m in MERGES)])}
    raw = Tokenizer(models.BPE(vocab, MERGES))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return _added(raw)


def byte_fallback() -> Tokenizer:
    """As in Llama 2: words carry U+2581, unknown characters are <0xNN> tokens."""
    words = ["▁", "▁a", "▁the", "s", "é", "▁é", "x", ".", "▁."]
    vocab = {piece: i for i, piece in enumerate(
        ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    raw = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    raw.normalizer = normalizers.Prepend("▁")
    raw.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    return _added(raw)


def _added(raw: Tokenizer) -> Tokenizer:
    for text, special in ADDED:
        raw.add_tokens([AddedToken(text, special=special, normalized=False)])
    return raw
