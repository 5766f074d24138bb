"""Text to ids and back: tokenizer.json folders, GGUF metadata, and what is refused."""
from __future__ import annotations

import io
import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from tokenizers.decoders import DecodeStream

from penstock.config.base.errors import ConfigError, RequestError, show
from penstock.model.weights.locate import ModelFiles, locate
from penstock.text.gguf_tokenizer import tokenizer_of_gguf
from penstock.text.tokenizer import Tokenizer, open_tokenizer

RECORDED = Path(__file__).parents[1] / "data" / "smollm2_ids.jsonl"
TEXTS = [json.loads(line)["text"] for line in RECORDED.read_text().splitlines()]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level_json(folder: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A folder with a byte-level tokenizer: 256 bytes, 'he' (256), <s> (257), </s> (258)."""
    raw = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*ALPHABET, "he"])},
                                          merges=[("h", "e")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "</s>"])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    raw.enable_truncation(3)
    raw.enable_padding(length=8)
    folder.mkdir(parents=True, exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None} | (config or {})))
    for name, value in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def opened(folder: Path, override: str | None = None) -> Tokenizer:
    tokenizer = open_tokenizer(locate(str(folder), load_format="dummy"), override)
    assert tokenizer is not None
    return tokenizer


def test_a_folder(tmp_path: Path) -> None:
    made = opened(byte_level_json(tmp_path, generation_config__json={"eos_token_id": [3, 258]}))
    ids = made.encode("hello </s>")
    assert ids[:2] == [257, 256] and ids[-1] == 258 and len(ids) == 7      # neither cut nor padded
    assert made.encode("hello", add_special=False) == ids[1:5]
    assert made.decode(ids) == "hello " and made.decode(ids, skip_special=False) == "<s>hello </s>"
    assert made.eos_ids == (3, 258) and made.vocab_size == 259
    assert made.special_ids == {257, 258}
    assert made.template_vars == {"bos_token": "<s>", "eos_token": "</s>"}
    assert made.chat_template is None


def test_bytes_of_tokens_join_to_the_text(tmp_path: Path) -> None:
    made = opened(byte_level_json(tmp_path))
    for text in TEXTS:
        ids = made.encode(text, add_special=False)
        assert b"".join(map(made.token_bytes, ids)) == text.encode()
    first = made.encode("é", add_special=False)[0]
    assert made.token_bytes(first) == b"\xc3" and made.token_text(first) == "\ufffd"
    assert made.token_bytes(257) == b"<s>" and made.token_text(256) == "he"
    for outside in (259, 2**40, -1):
        assert made.token_bytes(outside) == b"" and made.token_text(outside) == ""
    assert made.decode([256, 259]) == "he"


def test_streamed_text_is_the_whole_text(tmp_path: Path) -> None:
    made = opened(byte_level_json(tmp_path))
    for text in TEXTS[:40]:
        stream = DecodeStream(skip_special_tokens=True)
        parts = [stream.step(made.raw, i) for i in made.encode(text)]
        assert "".join(p for p in parts if p) == text


def test_half_a_surrogate_pair_is_a_bad_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        opened(byte_level_json(tmp_path)).encode("a\ud800")


@pytest.mark.parametrize(("config", "files", "wanted"), [
    ({"chat_template": "A"}, {}, "A"),
    ({"chat_template": "A"}, {"chat_template__json": {"chat_template": "B"}}, "B"),
    ({"chat_template": "A"}, {"chat_template__jinja": "C\n", "chat_template__json": {}}, "C\n"),
    ({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]},
     {}, "D"),
    ({"chat_template": [{"name": "tool_use", "template": "T"}]}, {}, None)])
def test_chat_template_is_found(tmp_path: Path, config: dict[str, Any], files: dict[str, Any],
                                wanted: str | None) -> None:
    assert opened(byte_level_json(tmp_path, config, **files)).chat_template == wanted


def test_a_model_without_a_tokenizer_and_an_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     ) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"model_type": "llama", "eos_token_id": 9}')
    files = locate(str(bare), load_format="dummy")
    assert open_tokenizer(files) is None
    other = byte_level_json(tmp_path / "other")
    for given in (other, other / "tokenizer.json"):
        assert opened(bare, str(given)).eos_ids == (9, 258)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    byte_level_json(tmp_path / "hub/models--org--m/snapshots/a")
    assert opened(bare, "org/m").vocab_size == 259
    for given, words in (("org/absent", "no such model in the hub cache"),
                         (str(bare), "there is no tokenizer.json"),
                         (str(bare / "config.json") + ".txt", "no such file")):
        with pytest.raises(ConfigError, match=words):
            open_tokenizer(files, given)
    (bare / "tokenizer.model").touch()
    with pytest.raises(ConfigError, match=r"has tokenizer\.model but no tokenizer\.json; convert"):
        open_tokenizer(locate(str(bare), load_format="dummy"))


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"version": "1.0"}', '{"model": {"type": "BPE", "vocab": {}, "merges": [3]}}',
    '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["x y"]}}',
    '{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"<unk>"}}',
    '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"],'
    '"continuing_subword_prefix":"long"}}',                   # a panic inside the library
    '{"version":"1.0","pre_tokenizer":{"type":"Split","pattern":{"Regex":"("},"behavior":"Isolated",'
    '"invert":false},"model":{"type":"BPE","vocab":{},"merges":[]}}'])
def test_broken_tokenizer_json(tmp_path: Path, text: str) -> None:
    folder = byte_level_json(tmp_path)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer that works") as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", [3, {}, [{"name": "default", "template": 3}]])
def test_chat_template_of_another_type(tmp_path: Path, template: Any) -> None:
    with pytest.raises(ConfigError, match="chat_template is"):
        opened(byte_level_json(tmp_path, {"chat_template": template}))


# ---------------------------------------------------------------- GGUF metadata
def metadata(tokens: list[str], types: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
    kinds = array("i", [(types or {}).get(t, 1) for t in tokens])
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds} | {
                f"tokenizer.ggml.{key}": value for key, value in more.items()}


# "he" is reached by a merge, "hey" only by ignoring merges.
BYTE_TOKENS = [*ALPHABET, "he", "hey", "12", "123", "<tool>", "<s>", "</s>"]
BYTE_TYPES = {"<tool>": 4, "<s>": 3, "</s>": 3}


def pieces(pre: str, text: str, **more: Any) -> list[str]:
    made = tokenizer_of_gguf(metadata(BYTE_TOKENS, BYTE_TYPES, pre=pre, bos_token_id=261, eos_token_id=262,
                                      merges=["h e", "1 2", "12 3"], **more), "file")
    return [BYTE_TOKENS[i] for i in made.encode(text).ids]


def test_pre_tokenisers_split_as_their_models() -> None:
    assert pieces("smollm", "hey 123") == ["he", "y", "Ġ", "1", "2", "3"]
    assert pieces("qwen2", "hey 123") == ["he", "y", "Ġ", "1", "2", "3"]
    assert pieces("llama-bpe", "hey 123") == ["<s>", "hey", "Ġ", "123"]
    assert pieces("llama-bpe", "1231") == ["<s>", "123", "1"]
    # Qwen composes characters, the others do not.
    assert len(pieces("qwen2", "e\u0301")) == 2 and len(pieces("smollm", "e\u0301")) == 3
    assert pieces("qwen2", "a<tool>b</s>") == ["a", "<tool>", "b", "</s>"]


def test_bos_and_eos_as_the_file_says() -> None:
    assert pieces("smollm", "h", add_bos_token=True) == ["<s>", "h"]
    assert pieces("llama-bpe", "h", add_bos_token=False) == ["h"]
    assert pieces("llama-bpe", "h", add_eos_token=True) == ["<s>", "h", "</s>"]
    made = tokenizer_of_gguf(metadata(BYTE_TOKENS, BYTE_TYPES, merges=[]), "file")
    skipped = made.decode(made.encode("a<tool><s>").ids, skip_special_tokens=True)
    assert skipped == "a<tool>"                              # user-defined tokens are text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "bert"}, "tokenizer model 'bert' is not supported; gpt2 and llama are"),
    "no model": ({"model": None}, "tokenizer model None"),
    "pre-tokeniser": ({"pre": "gemma4"}, "'gemma4' is not supported; smollm, gpt-2, llama-bpe, "),
    "no pre-tokeniser": ({"pre": None}, "pre-tokeniser None"),
    "no tokens": ({"tokens": []}, "0 tokens"),
    "tokens that are numbers": ({"tokens": array("i", [1])}, "tokens has a wrong type"),
    "types": ({"token_type": array("i", [1])}, "and 1 token types"),
    "twice": ({"tokens": ["a", "a"], "token_type": array("i", [1, 1])}, "twice"),
    "empty token": ({"tokens": ["a", ""], "token_type": array("i", [1, 1])}, "token 1 is empty"),
    "merge": ({"merges": ["he"]}, "'he' is not a merge"),
    "three in a merge": ({"merges": ["h e y"]}, "'h e y' is not a merge"),
    "merge of an absent token": ({"merges": ["q qq"]}, "not a tokenizer that works"),
    "bos": ({"bos_token_id": 999}, "bos_token_id 999 is not in the vocabulary"),
    "scores": ({"model": "llama", "scores": array("f", [1.0])}, "and 1 scores"),
    "NaN score": ({"model": "llama", "scores": array("f", [float("nan")] * len(BYTE_TOKENS))},
                  "is not a number"),
    "normaliser": ({"model": "llama", "precompiled_charsmap": array("b", [1])}, "precompiled_charsmap"),
    "long piece": ({"model": "llama", "tokens": ["a" * 600], "token_type": array("i", [1]),
                    "scores": array("f", [0.0])}, "600 characters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_gguf_tokenizers_that_are_refused(case: str) -> None:
    changes, words = REFUSED[case]
    given = metadata(BYTE_TOKENS, BYTE_TYPES) | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    with pytest.raises(ConfigError) as caught:
        tokenizer_of_gguf(given, "file")
    assert words in str(caught.value) and "\n" not in show(str(caught.value))


@pytest.fixture(scope="module")
def trained() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE with byte fallback and Llama's settings, trained on the recorded texts."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, model_type="bpe", vocab_size=900,
        byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True,
        num_threads=1, minloglevel=2)
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def spm_metadata(trained: sentencepiece.SentencePieceProcessor, **more: Any) -> dict[str, Any]:
    count = range(trained.vocab_size())
    kinds = array("i", [2 if trained.is_unknown(i) else 3 if trained.is_control(i)
                        else 6 if trained.is_byte(i) else 1 for i in count])
    return metadata([trained.id_to_piece(i) for i in count], model="llama", pre="default",
                    token_type=kinds, scores=array("f", [trained.get_score(i) for i in count]),
                    bos_token_id=1, eos_token_id=2, unknown_token_id=0, **more)


def test_sentencepiece_ids_equal_its_own(trained: sentencepiece.SentencePieceProcessor) -> None:
    made = tokenizer_of_gguf(spm_metadata(trained), "file")
    rng = random.Random(1)
    parts = ["the ", " ", "  ", "\n", "ing", "é", "日", "🙂", "12", "\t", "ſ", "a", "Zq", ". "]
    texts = TEXTS + ["".join(rng.choices(parts, k=rng.randint(1, 20))) for _ in range(500)]
    for text in texts:
        if text:
            ids = made.encode(text).ids
            assert ids == [1, *trained.encode(text)], text
            assert made.decode(ids) == text


def test_sentencepiece_without_the_space_in_front(trained: sentencepiece.SentencePieceProcessor,
                                                  tmp_path: Path) -> None:
    with_space = tokenizer_of_gguf(spm_metadata(trained), "file")
    without = Tokenizer(tokenizer_of_gguf(spm_metadata(trained, add_space_prefix=False), "file"),
                        eos_ids=(), chat_template=None, template_vars={})
    assert without.encode(" a") == with_space.encode("a").ids
    for text in ("the end\n", " 日本 🙂", "  x"):
        ids = without.encode(text, add_special=False)
        assert b"".join(map(without.token_bytes, ids)) == text.encode()
        assert without.decode(ids) == text


# ---------------------------------------------------------------- the demo
def test_demo_ids_equal_the_recorded_ones() -> None:
    files: ModelFiles = locate("demo")
    made = open_tokenizer(files)
    assert made is not None
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    assert len(lines) == 185
    for line in lines:
        assert made.encode(line["text"]) == line["ids"], line["text"]
        assert b"".join(map(made.token_bytes, line["ids"])) == line["text"].encode()
    assert made.eos_ids == (2,) == files.eos_ids and made.vocab_size == 49152
    assert made.template_vars["eos_token"] == "<|im_end|>" and len(made.special_ids) == 17
    assert made.chat_template is not None and "add_generation_prompt" in made.chat_template
