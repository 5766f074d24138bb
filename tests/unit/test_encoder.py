"""Long texts are refused by their length, or encoded on a thread with the same ids and errors."""
from __future__ import annotations

import asyncio
import string

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from penstock.config.base.errors import CONTEXT_EXCEEDED, RequestError
from penstock.text.encoder import INLINE_CHARS_MAX, Encoder, TokenBound, bound
from penstock.text.tokenizer import Tokenizer
from penstock.text.turns import TooManyTexts

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = "hello é wörld ☃ \n"


def raw_of(pieces=ALPHABET, merges=(("h", "e"), ("he", "l")), *, splits=None, normalizer=None, **model):
    raw = tokenizers.Tokenizer(models.BPE(
        {p: i for i, p in enumerate([*pieces, *("".join(m) for m in merges)])}, list(merges), **model))
    raw.pre_tokenizer = splits or pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.add_special_tokens(["<s>"])
    return raw


def tokenizer_of(raw) -> Tokenizer:
    return Tokenizer(raw, eos_ids=(), chat_template=None, template_vars={})


@pytest.fixture(scope="module")
def plain():
    encoder = Encoder(tokenizer_of(raw_of()))
    yield encoder
    encoder.close()


def encode(encoder, *texts, context=1 << 30, special=False):
    return asyncio.run(encoder.encode(texts, special=special, context=context))


def test_long_texts_get_the_ids_that_the_tokenizer_gives(plain):
    long = WORDS * (INLINE_CHARS_MAX // len(WORDS) + 1)
    assert len(long) > INLINE_CHARS_MAX
    made = tokenizer_of(raw_of())
    assert encode(plain, long, "<s>he") == [made.encode(t, add_special=False) for t in (long, "<s>he")]
    assert encode(plain, "he") == [made.encode("he", add_special=False)]


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(plain, monkeypatch):
    assert plain._bound == TokenBound(3)
    monkeypatch.setattr(plain, "_encode", None)
    with pytest.raises(RequestError, match="30000 characters, which are at least 10000 tokens") as e:
        encode(plain, "x" * 30_000, context=10_000)
    assert (e.value.param, e.value.code) == ("prompt", CONTEXT_EXCEEDED)


def test_a_text_that_may_fit_and_does_not_is_refused_with_its_count(plain):
    with pytest.raises(RequestError, match="However, the prompt has 20000 tokens, which is longer") as e:
        encode(plain, "x" * 20_000, context=20_000)
    assert e.value.code == CONTEXT_EXCEEDED
    assert len(encode(plain, "x" * 20_000, context=20_001)[0]) == 20_000


def test_the_loop_goes_on_while_a_text_is_encoded(plain):
    async def go():
        work = asyncio.ensure_future(plain.encode([WORDS * 50_000], special=False, context=1 << 30))
        turns = 0
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns, len(await work)
    turns, texts = asyncio.run(go())         # with the lock held it would be none or two, whatever the text
    assert turns > 50 and texts == 1


def test_half_a_character_in_a_long_text_is_refused(plain):
    with pytest.raises(RequestError, match="surrogate"):
        encode(plain, "x" * 20_000 + "\ud800")


def test_a_pattern_that_exhausts_its_engine_is_a_request_error(capfd):
    made = tokenizer_of(raw_of(splits=pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])))
    bad = "a" * 60 + "b"
    with pytest.raises(RequestError, match="gives up at this text") as e:
        made.encode(bad)
    assert e.value.param == "prompt" and made.encode("ok")
    encoder = Encoder(made)
    try:
        with pytest.raises(RequestError, match="gives up at this text"):
            encode(encoder, bad + "x" * 20_000)
        assert encode(encoder, "ok")
    finally:
        encoder.close()


def test_texts_at_once_are_limited_and_one_that_is_left_keeps_its_place(plain, monkeypatch):
    monkeypatch.setattr(plain._turns, "_most", 2)

    async def go():
        long = "x" * 20_000
        open_now = [asyncio.ensure_future(plain.encode([long], special=False, context=1 << 30)) for _ in "ab"]
        await asyncio.sleep(0)
        open_now.pop().cancel()
        await asyncio.sleep(0)
        with pytest.raises(TooManyTexts):
            await plain.encode([long], special=False, context=1 << 30)
        assert await plain.encode(["short"], special=False, context=1 << 30)
        await open_now.pop()
        while plain._turns.num_open:
            await asyncio.sleep(0.001)
        return await plain.encode([long], special=False, context=1 << 30)
    assert len(asyncio.run(go())[0]) == 20_000


BOUNDED = {
    "byte level": raw_of(),
    "bytes missing": raw_of([p for p in ALPHABET if p not in "xñòĄ"]),       # bytes x, F1, F2, 04
    "composed": raw_of(normalizer=normalizers.NFC()),
    "unknown": raw_of(["<u>", *string.ascii_lowercase], unk_token="<u>", splits=pre_tokenizers.Metaspace()),
    "fallback": raw_of([f"<0x{b:02X}>" for b in range(256)] + list("helo▁"), byte_fallback=True,
                       splits=pre_tokenizers.Metaspace(), normalizer=normalizers.Replace(" ", "▁")),
}


@given(name=st.sampled_from(sorted(BOUNDED)),
       text=st.text() | st.text(alphabet="hexlo<s>\u0301\x04\U00050000")
       | st.integers(0, 50).map(lambda n: "hel" * n))
def test_no_text_has_fewer_tokens_than_its_length_says(name, text):
    raw = BOUNDED[name]
    assert bound(raw.to_str()).tokens(text) <= len(raw.encode(text, add_special_tokens=False).ids)


def eats_spaces():
    raw = raw_of()
    raw.add_tokens([AddedToken("<m>", lstrip=True)])
    return raw


@pytest.mark.parametrize("raw", [
    raw_of(["<u>", *"helo"], unk_token="<u>", fuse_unk=True), raw_of(["h", "e", "l"]),
    raw_of(normalizer=normalizers.Strip()), raw_of(splits=pre_tokenizers.Whitespace()), eats_spaces(),
    raw_of(normalizer=normalizers.Replace(Regex(" +"), "  ")),
    raw_of(normalizer=normalizers.Replace("ab", "")), raw_of(splits=pre_tokenizers.Punctuation("removed")),
    tokenizers.Tokenizer(models.WordLevel({"<u>": 0}, unk_token="<u>")),
    raw_of(splits=pre_tokenizers.Sequence([
        pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])),
])
def test_where_characters_can_vanish_there_is_no_bound(raw):
    assert bound(raw.to_str()) is None
