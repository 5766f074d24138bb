"""LLM and the terminal commands with the demo model: text in, text out."""
from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import LLM, AsyncLLM, ConfigError, RequestError, SamplingParams
from penstock.cli import commands
from penstock.config.settings.cli import Parser
from penstock.config.settings.tree import Config, ModelConfig
from penstock.llm.outputs import Delta

CONFIG = Config(model=ModelConfig(model="demo"))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", threads=1, max_num_seqs=8, kv_cache_memory_bytes="300M") as llm:
        yield llm


def test_prompts_in_every_form_give_the_same_answer(llm):
    text = "The capital of France is"
    results = llm.generate([text, {"prompt": text}, {"prompt_token_ids": [504, 3575, 282, 4649, 314]}],
                           GREEDY)
    first = results[0]
    assert first.prompt == text and first.prompt_token_ids == [504, 3575, 282, 4649, 314]
    assert results[2].prompt is None
    assert first.outputs[0].text.startswith(" Paris.")
    assert len(first.outputs[0].token_ids) == 12 and first.outputs[0].finish_reason == "length"
    assert all(r.outputs == first.outputs for r in results)


def test_a_stream_joins_to_the_whole_answer(llm):
    whole = llm.generate("Once upon a time", GREEDY)[0].outputs[0]
    deltas = list(llm.stream("Once upon a time", GREEDY))
    assert len(deltas) >= 12
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert deltas[-1].finish_reason == "length"


def test_chat_ends_by_itself_and_hides_its_end(llm):
    params = SamplingParams(temperature=0.0, max_tokens=40)
    one, two = llm.chat([FRANCE, [{"role": "system", "content": "Be brief."}, *FRANCE]], params)
    assert one.outputs[0].text == "The capital of France is Paris."
    assert one.outputs[0].finish_reason == two.outputs[0].finish_reason == "stop"
    assert one.outputs[0].token_ids[-1] == 2 and "<|im_end|>" in one.prompt
    assert "".join(d.text for d in llm.stream_chat(FRANCE, params)) == one.outputs[0].text


def test_a_stop_string_cuts_the_answer_and_the_engine_goes_on(llm):
    free = llm.generate("The capital of France is", GREEDY)[0].outputs[0].text
    stop = free[7:13]
    for shown in (False, True):
        params = SamplingParams(temperature=0.0, max_tokens=500, stop=(stop,),
                                include_stop_str_in_output=shown)
        output = llm.generate("The capital of France is", params)[0].outputs[0]
        assert output.text == free[:13 if shown else 7]
        assert output.finish_reason == "stop" and output.stop_reason == stop
        assert len(output.token_ids) < 12


def test_logprobs_are_those_of_the_chosen_tokens(llm):
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3)
    output = llm.generate("One two three four", params)[0].outputs[0]
    assert len(output.logprobs) == 5
    for token, row in zip(output.token_ids, output.logprobs, strict=True):
        assert row[token].rank == 1 and len(row) == 3
        assert row[token].logprob == max(lp.logprob for lp in row.values()) <= 0
        assert [lp.rank for lp in row.values()] == [1, 2, 3]
    assert "".join(row[t].decoded_token for t, row in
                   zip(output.token_ids, output.logprobs, strict=True)) == output.text


def test_a_repeated_prompt_is_found_in_the_cache_and_answers_alike(llm):
    prompt = "penstock " * 100
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens < 16 and second.num_cached_tokens >= 80
    assert first.outputs == second.outputs


def test_seeds_repeat_and_choices_differ(llm):
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=8)
    a, b = llm.generate(["Tell me about rivers."] * 2, params)
    assert a.outputs == b.outputs
    assert len({o.text for o in a.outputs}) == 3


def test_bad_requests_name_their_field_and_leave_the_engine_well(llm):
    too_long = {"prompt_token_ids": [5] * llm.max_model_len}
    for prompt, message in [("", "empty"), (too_long, str(llm.max_model_len)),
                            ("half \ud800 pair", "surrogate")]:
        with pytest.raises(RequestError, match=message):
            llm.generate(["fine", prompt], GREEDY)
    with pytest.raises(RequestError, match="role"):
        llm.chat([{"role": "wizard", "content": "hi"}])
    assert llm.generate("The capital of France is", GREEDY)[0].outputs[0].text.startswith(" Paris.")


def test_the_async_form_streams_beside_others():
    async def go():
        async with AsyncLLM("demo", threads=1, kv_cache_memory_bytes="100M") as llm:
            async def joined(prompt):
                return "".join([d.text async for d in llm.stream(prompt, GREEDY)])

            prompts = ["The capital of France is", "Once upon a time"]
            streamed = await asyncio.gather(*map(joined, prompts))
            whole = await llm.generate(prompts, GREEDY)
            assert streamed == [r.outputs[0].text for r in whole]
            assert (await llm.chat(FRANCE, GREEDY))[0].outputs[0].finish_reason == "stop"
    asyncio.run(asyncio.wait_for(go(), 300))


def test_unknown_models_and_templates_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="no such"):
        LLM(str(tmp_path / "nowhere.gguf"))
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    with pytest.raises(ConfigError, match="chat template"):
        LLM("demo", chat_template=str(broken), kv_cache_memory_bytes="50M")


# ---------------------------------------------------------------- the terminal
def arguments(command, *words):
    parser = Parser(prog=f"penstock {command}")
    commands.add_arguments(parser)
    args = parser.parse(words)
    args.command = command
    return args


def test_generate_streams_one_prompt_to_stdout(llm, capsys):
    args = arguments("generate", "--prompt", "The capital of France is", "--max-tokens", "12")
    assert commands.run(llm.config, args) == 0
    expected = llm.generate("The capital of France is", GREEDY)[0].outputs[0].text
    assert capsys.readouterr().out == expected + "\n"


def test_generate_answers_a_file_in_order(llm, capsys, tmp_path):
    asked, told = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\n".join(map(json.dumps, [
        {"id": "a", "prompt": "The capital of France is"}, {"id": "b", "messages": FRANCE},
        {"id": "c", "prompt": ""}, {"prompt_token_ids": [504, 3575, 282, 4649, 314]}])) + "\n\n")
    args = arguments("generate", "--input", str(asked), "--output", str(told), "--max-tokens", "12")
    assert commands.run(llm.config, args) == 1
    a, b, c, d = map(json.loads, told.read_text().splitlines())
    assert a["id"] == "a" and a["text"].startswith(" Paris.") and a["num_prompt_tokens"] == 5
    assert b["id"] == "b" and b["finish_reason"] == "stop"
    assert c["id"] == "c" and "empty" in c["error"]
    assert d["text"] == a["text"]
    captured = capsys.readouterr()
    assert captured.out == "" and "1 of 4 requests were refused" in captured.err


def test_chat_keeps_a_history_until_reset(llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(
        "What is the capital of France?\n\n/help\nWhat did I ask?\n/reset\n"
        "What is the capital of France?\n"))
    args = arguments("chat", "--temperature", "0", "--max-tokens", "12")
    assert commands.run(llm.config, args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-1] == "The capital of France is Paris." and len(lines) >= 3


class Answers:
    """An LLM that says what it is told to, then fails as it is told to."""

    def __init__(self, *script):
        self.script = list(script)

    def stream_chat(self, messages, params):
        said, error = self.script.pop(0)
        yield Delta(said, [1])
        if error is not None:
            raise error


def test_a_ctrl_c_keeps_what_was_said_and_a_refusal_keeps_nothing(capsys):
    llm = Answers(("half an", KeyboardInterrupt()), ("", RequestError("too long")), ("yes", None))
    talk = commands.Conversation(llm, GREEDY, system="Be kind.")
    talk.run(["one", "two", "three", "/nonsense"])
    assert [(m["role"], m["content"]) for m in talk.messages] == [
        ("system", "Be kind."), ("user", "one"), ("assistant", "half an"),
        ("user", "three"), ("assistant", "yes")]
    told = capsys.readouterr()
    assert told.out == "half an\nyes\n" and "[stopped]" in told.err and "too long" in told.err
    talk.run(["/system Be rude."])
    assert talk.messages == [{"role": "system", "content": "Be rude."}]


def test_an_empty_prompt_is_refused_before_anything_loads(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert commands.run(CONFIG, arguments("generate")) == 1
    assert "empty" in capsys.readouterr().err


@pytest.mark.parametrize("words, message", [
    (("--temperature", "-1"), "--temperature is -1.0"), (("--max-tokens", "0"), "--max-tokens is 0"),
    (("--input", "/nowhere"), "--input /nowhere"), (("--output", "x"), "needs --input"),
], ids=str)
def test_wrong_flags_are_config_errors_before_anything_loads(words, message):
    with pytest.raises(ConfigError, match=message):
        commands.run(CONFIG, arguments("generate", *words))


def test_lines_that_are_no_requests_are_named(tmp_path):
    path = tmp_path / "in.jsonl"
    for line in ("nonsense", "[1]", '{"prompt": "a", "messages": []}', '{"text": "a"}'):
        path.write_text('{"prompt": "fine"}\n' + line)
        with pytest.raises(ConfigError, match="line 2"):
            commands.run(CONFIG, arguments("generate", "--input", str(path)))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_every_example_runs_and_is_short(llm, path, monkeypatch, capsys):
    """With the engine of these tests where it asks for no flags; one of its own flags as a program."""
    assert len(path.read_text().splitlines()) < 60
    if path.name == "long_context.py":
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        return
    monkeypatch.setattr(penstock, "LLM", lambda model: contextlib.nullcontext(llm))
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_there_are_examples():
    assert {p.name for p in EXAMPLES} >= {"offline.py", "streaming.py", "chat.py"}


def test_logprobs_of_a_prompt_are_those_of_the_same_tokens_when_they_are_answers(llm):
    """Of a cached prompt too, whose first part is taken from the cache where nobody asks for it."""
    ids = llm.generate("One two three four five six seven eight nine ten, 11", GREEDY)[0].prompt_token_ids * 4
    head, tail = ids[:40], ids[40:]
    forced = SamplingParams(temperature=0.0, max_tokens=len(tail), forced=tuple(tail), logprobs=2)
    [answer] = llm.generate({"prompt_token_ids": head}, forced)[0].outputs
    for start, cached in ((0, 0), (40, 32)):
        output = llm.generate({"prompt_token_ids": ids}, SamplingParams(
            temperature=0.0, max_tokens=1, n=2, prompt_logprobs=2, prompt_logprobs_start=start))[0]
        assert output.num_cached_tokens == cached and len(output.prompt_logprobs) == len(ids)
        assert output.prompt_logprobs[0] is None and output.prompt_logprobs[:start] == [None] * start
        for token, row, other in zip(tail, output.prompt_logprobs[40:], answer.logprobs, strict=True):
            assert row[token].logprob == pytest.approx(other[token].logprob, abs=0.15), "bfloat16"
            assert len(row) in (2, 3) and row[token].decoded_token == other[token].decoded_token
    with pytest.raises(RequestError, match="prompt_logprobs"):
        llm.generate("a", SamplingParams(prompt_logprobs=21))
