"""Deltas against whole decodes: any ids, any split, any stop strings."""
from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from penstock.text.detokenize import BROKEN, Detokenizer
from penstock.text.tokenizer import Tokenizer

_spec = importlib.util.spec_from_file_location(
    "tokenizers_fake", Path(__file__).with_name("tokenizers_fake.py"))
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)

LEVEL, FALLBACK = (
    Tokenizer(raw, eos_ids=(), chat_template=None, template_vars={})
    for raw in (fake.byte_level(), fake.byte_fallback()))
SIZE = LEVEL.raw.get_vocab_size()
any_ids = st.lists(st.integers(0, SIZE + 3), max_size=40)      # also ids that are no token
letters = st.lists(st.sampled_from(LEVEL.raw.encode("abhello").ids), max_size=30)
stops = st.lists(st.text("abehlo", min_size=1, max_size=4), max_size=3)


def split(ids, cuts):
    edges = [0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def run(detokenizer, parts):
    """All deltas, the last one being flush's."""
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


def ids(text):
    return LEVEL.raw.encode(text).ids


@given(any_ids, st.lists(st.integers(0, 100), max_size=5), st.booleans())
def test_joined_deltas_are_the_whole_decode_also_of_broken_utf8(tokens, cuts, skip):
    deltas = run(Detokenizer(LEVEL, skip_special=skip), split(tokens, cuts))
    whole = LEVEL.raw.decode([t for t in tokens if t < SIZE], skip_special_tokens=skip)
    assert "".join(d.text for d in deltas) == whole


@given(st.text(max_size=30))
def test_no_delta_has_a_half_character(text):
    detokenizer = Detokenizer(LEVEL)
    deltas = run(detokenizer, [[t] for t in ids(text)])
    assert "".join(d.text for d in deltas) == LEVEL.raw.decode(ids(text))
    assert sum(BROKEN in d.text for d in deltas) <= text.count(BROKEN)


@given(st.text("a the é☃s.x", max_size=20), st.integers(1, 3))
def test_byte_fallback_text_comes_in_whole_characters(text, step):
    tokens = FALLBACK.raw.encode(text).ids
    deltas = run(Detokenizer(FALLBACK), [tokens[i:i + step] for i in range(0, len(tokens), step)])
    assert "".join(d.text for d in deltas) == FALLBACK.raw.decode(tokens)
    assert all(BROKEN not in d.text for d in deltas)


def test_byte_fallback_shows_broken_bytes_after_a_few_tokens_and_not_never():
    half = FALLBACK.raw.token_to_id("<0xE2>")
    detokenizer = Detokenizer(FALLBACK)
    shown = [detokenizer.push([half]).text for _ in range(20)]
    assert "".join(shown).count(BROKEN) >= 12
    assert ("".join(shown) + detokenizer.flush().text).count(BROKEN) == 20


def test_first_word_keeps_its_space_after_a_prompt_and_loses_it_alone():
    the = FALLBACK.raw.token_to_id("▁the")
    assert Detokenizer(FALLBACK).push([the]).text == "the"
    assert Detokenizer(FALLBACK, context=[the, the]).push([the]).text == " the"


def test_special_tokens_between_words_do_not_eat_the_space():
    the, eos = FALLBACK.raw.token_to_id("▁the"), FALLBACK.raw.token_to_id(fake.EOS)
    deltas = run(Detokenizer(FALLBACK), [[the], [eos], [the]])
    assert [d.text for d in deltas] == ["the", "", " the", ""]


def expected_stop(pieces, found, min_tokens=0):
    """Slow definition: the first character at which a stop string is complete. Returns text before
    it, the stop string and the token that completes it."""
    start = sum(map(len, pieces[:min_tokens]))
    text = "".join(pieces)
    for end in range(start + 1, len(text) + 1):
        here = [s for s in found if text[:end].endswith(s)]
        if here:
            stop = max(here, key=len)
            done = 0
            for count, piece in enumerate(pieces, 1):
                done += len(piece)
                if done >= end:
                    return text[:end - len(stop)], stop, count
    return text, None, 0


@settings(max_examples=300)
@given(letters, stops, st.lists(st.integers(0, 100), max_size=4), st.integers(0, 4))
def test_stops_are_those_of_a_search_in_the_full_text(tokens, found, cuts, min_tokens):
    pieces = [LEVEL.raw.decode([t]) for t in tokens]
    text, stop, count = expected_stop(pieces, found, min_tokens)
    for parts in (split(tokens, cuts), [[t] for t in tokens]):
        deltas = run(Detokenizer(LEVEL, stop=found, min_tokens=min_tokens), parts)
        assert "".join(d.text for d in deltas) == text
        assert [(d.stop, d.count) for d in deltas if d.stop] == ([(stop, count)] if stop else [])


def test_a_stop_string_that_begins_within_min_tokens_is_found():
    tokens = [i for piece in ("a", "<", "END", ">", "x") for i in ids(piece)]
    detokenizer = Detokenizer(LEVEL, stop=["<END>"], min_tokens=2)
    deltas = run(detokenizer, [[t] for t in tokens])
    assert "".join(d.text for d in deltas) == "a"
    assert [d.stop for d in deltas if d.stop] == ["<END>"] and detokenizer.count == 6


def test_a_stop_string_that_ends_within_min_tokens_is_text():
    # "b" is complete within min_tokens, inside of what is held as a beginning of "abc".
    detokenizer = Detokenizer(LEVEL, stop=["abc", "b"], min_tokens=2)
    deltas = run(detokenizer, [[t] for t in ids("abxb")])
    assert "".join(d.text for d in deltas) == "abx"
    assert [d.stop for d in deltas if d.stop] == ["b"]


def test_an_added_token_is_its_own_text():
    raw = fake.byte_level()
    raw.add_tokens([AddedToken("<é>", normalized=False)])
    tokenizer = Tokenizer(raw, eos_ids=(), chat_template=None, template_vars={})
    tokens = tokenizer.encode("a<é>b")
    assert Detokenizer(tokenizer).push(tokens).text == "a<é>b"
    assert b"".join(map(tokenizer.token_bytes, tokens)) == "a<é>b".encode()


def test_what_may_begin_a_stop_string_is_held_until_it_does_not():
    detokenizer = Detokenizer(LEVEL, stop=["low"])
    assert [detokenizer.push([t]).text for t in ids("xlol")] == ["x", "", "", "lo"]
    assert detokenizer.flush().text == "l"


def test_stop_string_is_shown_when_asked_for_and_what_follows_never():
    tokens = [*ids("hello"), *ids(" wow")]
    shown = Detokenizer(LEVEL, stop=["lo w"], include_stop=True).push(tokens)
    assert (shown.text, shown.stop) == ("hello w", "lo w")
    detokenizer = Detokenizer(LEVEL, stop=["lo w"])
    assert detokenizer.push(tokens).text == "hel"
    assert (detokenizer.push(tokens).text, detokenizer.flush().text) == ("", "")


def test_chars_counts_what_was_decoded_before_each_token():
    detokenizer, offsets = Detokenizer(LEVEL, stop=["zz"]), []
    for token in ids("hello é!"):
        offsets.append(detokenizer.chars)
        detokenizer.push([token])
    assert offsets[0] == 0 and offsets[-1] == len("hello é")


@pytest.mark.parametrize("skip, shown", [(True, "a<tool>"), (False, "a<|end|><tool>")])
def test_special_tokens_are_hidden_and_other_added_tokens_are_not(skip, shown):
    tokens = [*ids("a"), LEVEL.raw.token_to_id("<|end|>"), LEVEL.raw.token_to_id("<tool>")]
    assert Detokenizer(LEVEL, skip_special=skip).push(tokens).text == shown


def test_without_a_tokenizer_there_is_no_text():
    detokenizer = Detokenizer(None)
    assert detokenizer.push([1, 2]).text == detokenizer.flush().text == ""
    assert detokenizer.count == 2
