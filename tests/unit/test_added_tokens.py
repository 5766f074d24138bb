"""Tokens and templates that files beside tokenizer.json add, compared with transformers; tiktoken.model."""
from __future__ import annotations

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.settings.tree import Config, ModelConfig
from penstock.model.weights.locate import locate
from penstock.text.gguf_tokenizer import tokenizer_of_gguf
from penstock.text.model_text import open_text
from penstock.text.tokenizer import Tokenizer, open_tokenizer
from penstock.text.vocabulary.patterns import KIMI

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = ["<think>a</think> b", "a  <think>  b", "<tool> x<tool>", "a<|im|>b <|im|>", "<s>a</s>", "x <mask> y",
         "plain text, é 中文 123", "<THINK>", "a<img>b", "<think>\n\n</think>\n\n<tool>"]
WITH_ID = {"content": "<think>", "special": False, "normalized": False, "lstrip": False, "rstrip": False,
           "single_word": False}


def folder(at: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A byte-level tokenizer of 256 bytes, <s> and </s> (special), <tool> (not), and files beside it."""
    raw = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(ALPHABET)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "</s>"])
    raw.add_tokens([AddedToken("<tool>", normalized=False)])
    raw.save(str(at / "tokenizer.json"))
    (at / "config.json").write_text('{"model_type": "llama"}')
    (at / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        **(config or {})}))
    for name, value in files.items():
        (at / f"{name}.json").write_text(json.dumps(value))
    return at


def opened(at: Path) -> Tokenizer:
    made = open_tokenizer(locate(str(at), load_format="dummy"))
    assert made is not None
    return made


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "decoder": ({"added_tokens_decoder": {"259": WITH_ID, "260": {**WITH_ID, "content": "</think>"}}}, {}),
    "decoder out of order": ({"added_tokens_decoder": {
        "261": WITH_ID, "260": {**WITH_ID, "content": "<|im|>", "special": True},
        "257": {**WITH_ID, "content": "</s>", "special": True}}}, {}),
    "decoder with spaces": ({"added_tokens_decoder": {
        "259": {**WITH_ID, "lstrip": True, "rstrip": True}, "260": {**WITH_ID, "content": "<|im|>",
                                                                     "rstrip": True}}}, {}),
    "decoder normalized": ({"added_tokens_decoder": {"259": {**WITH_ID, "normalized": True}}}, {}),
    "decoder of few words": ({"added_tokens_decoder": {"259": {"content": "<think>"}}}, {}),
    "decoder says otherwise": ({"added_tokens_decoder": {"258": {**WITH_ID, "content": "<tool>",
                                                                 "special": True}}}, {}),
    "additional": ({"additional_special_tokens": ["<think>", "</think>", "<s>", "<|im|>"]}, {}),
    "additional and decoder": ({"additional_special_tokens": ["<think>", "<|im|>"],
                                "added_tokens_decoder": {"259": WITH_ID}}, {}),
    "extra": ({"extra_special_tokens": ["<|im|>"]}, {}),
    "extra by name": ({"extra_special_tokens": {"image_token": "<img>"}}, {}),
    "named": ({"pad_token": "<|im|>", "mask_token": "<mask>", "unk_token": "<s>"}, {}),
    "named as objects": ({"pad_token": {**WITH_ID, "__type": "AddedToken", "content": "<|im|>",
                                        "lstrip": True}}, {}),
    "a model's own": ({"image_token": "<img>"}, {}),
    "older": ({}, {"added_tokens": {"<think>": 259, "</think>": 260}}),
    "older, special": ({}, {"added_tokens": {"<think>": 259, "<|im|>": 260},
                            "special_tokens_map": {"additional_special_tokens": ["<|im|>"],
                                                   "pad_token": "<think>"}}),
    "older map alone": ({}, {"special_tokens_map": {"pad_token": {"content": "<|im|>", "lstrip": False,
                                                                  "rstrip": True, "normalized": False,
                                                                  "single_word": False}}}),
    "decoder, not the older": ({"added_tokens_decoder": {"259": WITH_ID}}, {"added_tokens": {"<|im|>": 260}}),
}


@pytest.mark.parametrize("case", CASES)
def test_ids_equal_those_of_transformers(tmp_path, case):
    config, files = CASES[case]
    at = folder(tmp_path, config, **files)
    ours, theirs = opened(at), AutoTokenizer.from_pretrained(str(at))
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special=False) == ids, text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        if case != "older, special":        # transformers 5 forgets that such a token is special; 4 does not
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True,
                                                     clean_up_tokenization_spaces=False)
    assert ours.vocab_size == len(theirs)


def test_think_is_one_token(tmp_path):
    made = opened(folder(tmp_path, *CASES["decoder"][:1]))
    assert made.encode("<think>", add_special=False) == [259] and made.mark_id("</think>") == 260


@pytest.mark.parametrize("config, words", [
    ({"added_tokens_decoder": []}, "added_tokens_decoder is"),
    ({"added_tokens_decoder": {"x": {}}}, "an id and"),
    ({"added_tokens_decoder": {"1": {}}}, "is not a token"),
    ({"additional_special_tokens": "<a>"}, "a list is"),
    ({"additional_special_tokens": [3]}, "3 is not a token"), ({"pad_token": 3}, "3 is not a token")])
def test_tokens_of_another_form_are_refused_by_name(tmp_path, config, words):
    with pytest.raises(ConfigError, match=words):
        opened(folder(tmp_path, config))


# ---------------------------------------------------------------- templates by name
USER = [{"role": "user", "content": "Hi"}]
NAMED = [{"name": "default", "template": "D {{ messages[0].content }}"},
         {"name": "tool_use", "template": "T {{ tools | length }} {{ messages[0].content }}"},
         {"name": "rag", "template": "R"}]


@pytest.mark.parametrize("form", ["list", "folder"])
def test_a_template_is_chosen_by_tools_as_in_transformers(tmp_path, form):
    at = folder(tmp_path, {"chat_template": NAMED} if form == "list" else {})
    if form == "folder":
        (at / "additional_chat_templates").mkdir()
        (at / "chat_template.jinja").write_text(NAMED[0]["template"])
        for one in NAMED[1:]:
            (at / "additional_chat_templates" / f"{one['name']}.jinja").write_text(one["template"])
    theirs = AutoTokenizer.from_pretrained(str(at))
    tools = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {}}}]
    text = open_text(Config(model=ModelConfig(model=str(at))), locate(str(at), load_format="dummy"))
    try:
        assert text.template.reads("tools")
        for given in ((), tools):
            shown = text.template.render(USER, tools=given)
            assert shown == theirs.apply_chat_template(USER, tools=list(given) or None, tokenize=False)
            assert shown.startswith("T 1" if given else "D")
    finally:
        text.close()


def test_a_template_for_tools_alone_is_for_tools_alone(tmp_path):
    at = folder(tmp_path, {"chat_template": NAMED[1:2]})
    text = open_text(Config(model=ModelConfig(model=str(at))), locate(str(at), load_format="dummy"))
    try:
        assert text.template.render(USER, tools=[{}]) == "T 1 Hi"
        with pytest.raises(RequestError, match="with tools alone"):
            text.template.render(USER)
    finally:
        text.close()


# ---------------------------------------------------------------- tiktoken.model
CORPUS = ("def f(x):\n    return x + 1\n\n# Grüße, WORLD! don't we'll HelloWorld helloWorld 12345 中文字符 "
          "测试mixed字 日本語 emoji 😀👍🏽  spaces   \r\n tabs\t\tend ... the then there them thing\n") * 3


def trained(size: int = 330) -> dict[bytes, int]:
    """Ranks as a trainer finds them: the commonest pair of neighbours in a word, again and again."""
    ranks = {bytes([b]): b for b in range(256)}
    words = [[bytes([b]) for b in word.encode()] for word in CORPUS.replace(" ", " \0").split("\0")]
    while len(ranks) < size:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        pair = max(pairs, key=lambda p: (pairs[p], p))
        ranks[pair[0] + pair[1]] = len(ranks)
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == pair:
                    word[at:at + 2] = [pair[0] + pair[1]]
                at += 1
    return ranks


def kimi(at: Path, **config: Any) -> dict[bytes, int]:
    ranks = trained()
    (at / "config.json").write_text('{"model_type": "kimi_k2"}')
    (at / "tiktoken.model").write_bytes(b"".join(
        base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()))
    (at / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
        "added_tokens_decoder": {str(len(ranks)): {"content": "[BOS]", "special": True, "normalized": False},
                                 str(len(ranks) + 1): {"content": "[EOS]", "special": True},
                                 str(len(ranks) + 3): {"content": "<|im_end|>", "special": True}}, **config}))
    return ranks


def test_ids_of_a_tiktoken_file_equal_tiktokens(tmp_path):
    ranks = kimi(tmp_path)
    first = len(ranks)
    special = {"[BOS]": first, "[EOS]": first + 1, "<|im_end|>": first + 3,
               **{f"<|reserved_token_{i}|>": i for i in range(first, first + 256)
                  if i not in (first, first + 1, first + 3)}}
    theirs = tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special)
    ours = opened(tmp_path)
    texts = [CORPUS, *CORPUS.split(" "), *(CORPUS[i:i + 17] for i in range(len(CORPUS) // 3)),
             "[BOS]Hi<|im_end|>", f"<|reserved_token_{first + 2}|>x", "", "é\u0301", "字A字aA'LL"]
    for text in texts:
        ids = theirs.encode(text, allowed_special="all")
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special=False) == text
    assert ours.vocab_size == first + 256 == theirs.n_vocab
    assert ours.eos_ids == (first + 1,) and ours.mark_id("<|im_end|>") == first + 3
    assert b"".join(map(ours.token_bytes, ours.encode(CORPUS))) == CORPUS.encode()


@pytest.mark.parametrize("config, words", [
    ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class 'QWenTokenizer' is not known"),
    ({"added_tokens_decoder": {"7": {"content": "<a>"}}}, "has the id 7")])
def test_other_tiktoken_files_are_refused_by_name(tmp_path, config, words):
    kimi(tmp_path, **config)
    with pytest.raises(ConfigError, match=words):
        opened(tmp_path)


@pytest.mark.parametrize("text", [b"!!! 0\n", b"YQ== x\n", b"YQ==\n", b"YQ== 0\n", b"YQ== 0\nYQ== 1\n"])
def test_a_damaged_tiktoken_file_is_refused(tmp_path, text):
    kimi(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(text)
    with pytest.raises(ConfigError, match=r"tiktoken\.model: (line|its 1 tokens)"):
        opened(tmp_path)


def test_tekken_alone_says_which_file_to_add(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tekken\.json but no tokenizer\.json: add the tokenizer\.json"):
        opened(tmp_path)


# ---------------------------------------------------------------- pre-tokenisers of GGUF
@pytest.mark.parametrize("pre, parts", [
    ("gpt-4o", ["Hello", "World's", " XMLHttp", " ", "123", "45", " a", "/b", " 中文"]),
    ("deepseek-r1-qwen", ["HelloWorld", "'s", " XMLHttp", " ", "1", "2", "3"]),
    ("qwen35", ["e\u0301x", " ", "1", "2", "中文"]), ("glm4", ["HelloWorld", "'s", " ", "123", "45"]),
    ("llama3", ["HelloWorld", "'s", " ", "123", "45"]), ("tekken", ["Hello", "World", "'s", " ", "1"]),
    ("deepseek-v3", ["HelloWorld", "'s", " ", "123", "45", " XML", "中文", "ok", "!a"]),
    ("kimi-k2", ["Hello", "World's", " ", "123", "45", "中文", "ok"]), ("gpt-2", ["Hello", " 12345", "'s"])])
def test_gguf_splits_text_as_the_family_does(pre, parts):
    made = tokenizer_of_gguf({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": ALPHABET, "tokenizer.ggml.merges": []}, "file")
    text = "".join(parts)
    found = [text[a:b] for _, (a, b) in made.pre_tokenizer.pre_tokenize_str(text)]
    assert found == parts


SPLITS = json.loads((Path(__file__).parents[1] / "data" / "gguf_splits.json").read_text())


@pytest.mark.parametrize("pre", SPLITS["splits"])
def test_gguf_splits_equal_those_of_the_published_patterns(pre):
    """Capitals, endings, marks, numbers, scripts and white space, by another regular-expression engine."""
    made = tokenizer_of_gguf({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": ALPHABET, "tokenizer.ggml.merges": []}, "file")
    for text, golden in zip(SPLITS["texts"], SPLITS["splits"][pre], strict=True):
        found = [text[a:b] for _, (a, b) in made.pre_tokenizer.pre_tokenize_str(text)]
        assert "¦".join(found) == golden


@pytest.mark.parametrize("pre, whole", [
    ("glm4", True), ("glm5", True), ("llama-bpe", True), ("tekken", True), ("kimi-k2", True),
    ("gpt-4o", True), ("chatglm-bpe", False), ("qwen2", False), ("qwen35", False), ("deepseek-v3", False)])
def test_gguf_takes_a_word_that_is_a_token_whole_where_its_family_does(pre, whole):
    """Of ranks of tiktoken; elsewhere the merges alone decide."""
    tokens = [*ALPHABET, "xyz"]
    made = tokenizer_of_gguf({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}, "file")
    assert [tokens[i] for i in made.encode("xyz").ids] == (["xyz"] if whole else ["x", "y", "z"])
