"""`penstock eval`: questions whose answers are in their contexts, what counts as right, and intervals."""
from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
from argparse import Namespace
from pathlib import Path

import pytest

from penstock.cli.main import main as penstock
from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.settings.tree import Config, ModelConfig
from penstock.engine.client.client import EngineDied
from penstock.eval import main, tasks, words
from penstock.eval.tasks import Interview, Question, Size
from penstock.llm.outputs import Logprob

SIZE = Size(contexts=(256, 512), samples=2, questions=3, seed=1, tokens_of=lambda text: len(text.split()))


def pairs(context: str) -> dict[str, str]:
    found = context.split()
    return dict(zip(found[::2], found[1::2], strict=True))


def test_the_tokenizer_has_every_word_once_and_no_other_id() -> None:
    shipped = Path(__file__).parents[1] / "data/recall/tokenizer.json"
    vocab = json.loads(shipped.read_text())["model"]["vocab"]
    assert vocab == {word: i for i, word in enumerate(words.words())} and len(vocab) == words.VOCAB
    assert words.words()[words.CHAIN] == "chain" and words.words()[words.DIGIT + 7] == "7"


@pytest.mark.parametrize("task", ["recall", "tracking", "sum"])
def test_answers_in_words_follow_from_their_contexts(task: str) -> None:
    questions = tasks.in_words(task, SIZE)
    assert [q.group for q in questions] == ["256"] * 6 + ["512"] * 6
    assert questions == tasks.in_words(task, SIZE)
    for question in questions:
        context, _, asked = question.prompt.rpartition(" | ")
        assert len(question.prompt.split()) <= int(question.group)
        first, held = asked.split()[1], pairs(context)
        if task == "sum":
            keys = asked.split()[1::2]
            assert question.answer == str(sum(int(held[key]) for key in keys) % 10)
        elif task == "recall":
            assert question.answer == held[first]
        else:
            assert question.answer.split() == [held[first], held[held[first]]]
    [interview, *_] = tasks.interviews(task, SIZE)
    said = interview.dialogue.split()
    last = [said[places[-1]] for places in interview.answers]
    assert last == [q.answer.split()[-1] for q in questions[:3]]


def test_copying_goes_on_where_its_prompt_ends() -> None:
    for question in tasks.in_words("copying", SIZE):
        said, half = question.prompt.split(), int(question.group) // 2
        source, run = said[:half], [*said[half:], *question.answer.split()]
        at = source.index(run[0])
        assert len(run) == half and run == (source + source)[at:at + half]


def test_english_answers_are_in_their_contexts() -> None:
    for question in tasks.in_english("recall", SIZE):
        name = question.prompt.rpartition("As said above, the code of the ")[2].removesuffix(" is")
        assert f"The code of the {name} is {question.answer}.\n" in question.prompt
    for question in tasks.in_english("tracking", SIZE):
        name = question.prompt.rpartition("above, the ")[2].removesuffix(" points to the")
        middle, end = question.answer.split(" points to the ")
        assert f"The {name} points to the {middle}.\n" in question.prompt
        assert f"The {middle} points to the {end}.\n" in question.prompt
    long = Size(contexts=(16384,), samples=1, questions=2, seed=1, tokens_of=lambda text: len(text.split()))
    for task in ("recall", "tracking"):
        assert all(15000 < len(q.prompt.split()) <= 16384 for q in tasks.in_english(task, long))
    assert 1 < len({q.prompt.index(q.answer) for q in tasks.needles(SIZE, None)})


@pytest.mark.parametrize(("text", "right"), [
    (" red fox. The red fox points to the big owl", True), ("red fox points to the big owl.", True),
    (" big owl", False), ("", False), ("the red fox points to the big owl", False),
    ("red fox points to the big", False)])
def test_what_counts_as_right(text: str, right: bool) -> None:
    assert Question("", "", "red fox points to the big owl", 9).score(text) == right


def test_variables_and_common_words_follow_from_their_texts() -> None:
    size = Size(contexts=(2048,), samples=2, questions=3, seed=1, tokens_of=lambda text: len(text.split()))
    for question in tasks.variables(size):
        names, value = question.answer.split(), question.prompt.rpartition("the value ")[2].split(",")[0]
        said = [f"VAR {names[0]} = {value}.", *(f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(names))]
        assert len(names) == len({*names}) == 5
        places = [question.prompt.index(line) for line in said]
        assert places == sorted(places) and places[-1] - places[0] > 200
        assert 1900 < len(question.prompt.split()) <= 2048
        assert question.score(f"{names[2]}, VAR {names[0]} and others") == 0.4 and question.score("") == 0.0
    for question in tasks.common(size):
        listed = question.prompt.split("\n")[1].split()[1::2]
        often = sorted((listed.count(word), word) for word in {*listed})
        assert {word for _, word in often[-10:]} == {*question.answer.split()}
        assert often[-10][0] >= 10 * often[-11][0] and 1900 < len(question.prompt.split()) <= 2048


def test_gsm8k_reads_a_file_that_the_user_names(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "It is 2.\\n#### 1,002.50"}\n')
    [question] = tasks.gsm8k(str(path), 5, 0)
    assert question.answer == "1002.5" and question.chat and "1 + 1?" in question.prompt
    assert tasks.number_in("so 3 x 4 = 12, hence #### -1,200") == "-1200" and tasks.number_in("none") is None
    path.write_text('{"question": "1"}')
    with pytest.raises(ConfigError, match="not JSON lines"):
        tasks.gsm8k(str(path), 5, 0)
    path.write_text('{"question": "1 + 1?", "answer": "It is 2."}')
    with pytest.raises(ConfigError, match="must end in '#### number'"):
        tasks.gsm8k(str(path), 5, 0)


def test_a_mark_that_ends_lines_elsewhere_is_a_part_of_its_problem(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_bytes('{"question": "1\u2028+ 1?", "answer": "#### 2"}\n\n'.encode())
    [question] = tasks.gsm8k(str(path), 5, 0)
    assert question.prompt.startswith("1\u2028+ 1?") and question.answer == "2"


def test_intervals() -> None:
    assert main.interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert main.interval(98, 100) == pytest.approx((0.9300, 0.9945), abs=1e-4)
    low, mean, high = main.loss_interval([1.0] * 64 + [3.0] * 64)
    assert mean == 2.0 and high - mean == pytest.approx(1.959964) == mean - low
    assert main.loss_interval([2.0, 4.0]) == (3.0, 3.0, 3.0)


class Forced:
    """Stands for an engine: whoever asks for `v`-words gets rank 1, but for one of them."""

    llm = Namespace(encode=str.split)

    async def tokens(self, text: str) -> int:
        return len(text.split())

    async def forced(self, prompt: list[str], given: list[str]) -> list[Logprob]:
        places = [i for i, word in enumerate(given) if word[0] == "v"]
        return [Logprob(-math.log(2), 2 if i == places[0] else 1, word) for i, word in enumerate(given)]


def test_an_interview_counts_ranks_where_answers_are(capsys: pytest.CaptureFixture[str],
                                                          tmp_path: Path) -> None:
    args = Namespace(task="recall", contexts=(256,), samples=2, questions=3, eval_seed=0, concurrency=2,
                     quiet=True, forced=True, output_json=str(tmp_path / "out.json"))
    assert asyncio.run(main._interviews(Forced(), args)) == 0
    assert "4 of 6" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["groups"][0]["right"] == 4 and found["answers"][0]["right"] == [False, True, True]
    assert isinstance(tasks.interviews("recall", SIZE)[0], Interview)


@pytest.mark.parametrize(("given", "message"), [
    ((), "a MODEL or --base-url"), (("--base-url", "http://x",), "needs --task"),
    (("--base-url", "http://x", "--task", "text"), "--file FILE"),
    (("--base-url", "http://x", "--text", "f", "--needles"), "two tasks"),
    (("--base-url", "http://x", "--text", "f"), "in the library only"),
    (("--base-url", "http://x", "--task", "recall", "--file", "f"), "makes its own"),
    (("--base-url", "http://x", "--task", "needles", "--forced"), "while decoding"),
    (("--base-url", "http://x", "--needles", "--contexts", "1k"), "numbers of tokens"),
    (("--base-url", "http://x", "--needles", "--contexts", "64"), "at least 128"),
    (("--base-url", "http://x", "--needles", "--budgets", "half"), "--budgets half: numbers of tokens"),
    (("--base-url", "http://127.0.0.1:9", "--needles", "--samples", "0"), "at least 1"),
    (("--base-url", "http://127.0.0.1:9", "--needles"), "does not answer /v1/models"),
    (("--base-url", "http://x", "--task", "gsm8k", "--file", "f", "--contexts", "512"),
     "--contexts: --task gsm8k has no use for it"),
    (("--base-url", "http://x", "--needles", "--prefix", "0.5"), "--prefix: --task needles"),
    (("--base-url", "http://x", "--text", "f", "--file", "g"), "leave --file out"),
    (("--base-url", "http://x", "--needles", "--output-json", "/no/such/folder/f"), "f: No such file"),
])
def test_flags_that_do_not_go_together_are_one_line(given: tuple[str, ...], message: str,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    assert penstock(["eval", *given]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


class Refusing:
    """Stands for a library whose engine starts, and then does this."""

    max_model_len, has_chat_template = 8192, True

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def __aenter__(self) -> Refusing:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        raise self.error


def started(error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    monkeypatch.setattr(main, "AsyncLLM", lambda config: Refusing(error))
    return main.run(Config(model=ModelConfig(model="m")), parser.parse_args(["--task", "recall"]))


def test_a_model_without_a_tokenizer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="refused a request: this model has no tokenizer"):
        started(RequestError("this model has no tokenizer"), monkeypatch)


def test_an_engine_that_dies_is_told_with_its_end(monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert started(EngineDied(-9, ["its last line"]), monkeypatch) == 70
    assert "killed by signal 9\n  its last line" in capsys.readouterr().err


class Reader(Forced):
    """A token is as unlikely as its request's budget is small."""

    llm = Namespace(encode=lambda text: list(range(len(text))))

    async def forced(self, prompt: list[int], given: list[int], budget: int | None = None) -> list[Logprob]:
        assert given[0] == prompt[-1] + 1 and budget is not None
        return [Logprob(-1.0 if budget else -0.5, 1, str(i)) for i in given]


def test_a_text_is_read_with_each_budget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("x" * 300)
    args = Namespace(task="text", file=str(text), contexts=(128,), questions=2, prefix=0.75, budgets=(0, 96),
                     concurrency=2, quiet=True, output_json=str(out))
    assert asyncio.run(main._text(Reader(), args)) == 0
    said = capsys.readouterr().out
    assert "128, reads all" in said and "128, reads 96" in said
    assert [(c["budget"], c["tokens"], c["loss"]) for c in json.loads(out.read_text())["contexts"]] == [
        (0, 64, 0.5), (96, 64, 1.0)]


def test_problems_of_a_smaller_count_come_first_in_a_larger_one(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"question": "{n}?", "answer": "#### {n}"}}\n' for n in range(258)))
    many = tasks.gsm8k(str(path), 200, 0)
    assert tasks.gsm8k(str(path), 8, 0) == many[:8] and len({q.prompt for q in many}) == 200
