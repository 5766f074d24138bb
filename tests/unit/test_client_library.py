"""LLM and AsyncLLM against a real engine process whose core echoes prompts: ids in, ids out."""
from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.request.params import SamplingParams
from penstock.engine.client.client import EngineClient, EngineDied
from penstock.llm import llm as library
from penstock.llm.llm import LLM, AsyncLLM
from penstock.llm.outputs import checked_types, conversations, text_or_ids
from penstock.text.model_text import ModelText

ENGINE = [sys.executable, "-P", str(Path(__file__).with_name("engine_fake.py"))]
LONG = SamplingParams(max_tokens=None)


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch):
    monkeypatch.setattr(library, "EngineClient", functools.partial(EngineClient, argv=ENGINE))
    monkeypatch.setattr(library, "files_of", lambda model: None)
    monkeypatch.setattr(library, "open_text", lambda config, files: ModelText(None, None, (9,)))


def ids(*tokens):
    return {"prompt_token_ids": list(tokens)}


def stats(llm):
    return llm._run(llm._inner._client.stats())


def eventually(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def test_answers_come_in_order_with_all_that_is_known():
    with LLM("fake") as llm:
        one, two, three = llm.generate(
            [ids(5, 6), ids(7, 9, 8), ids(4)],
            [SamplingParams(max_tokens=3, n=2), SamplingParams(max_tokens=50),
             SamplingParams(max_tokens=2, logprobs=1)])
    assert [o.token_ids for o in one.outputs] == [[5, 6, 5]] * 2
    assert [o.index for o in one.outputs] == [0, 1]
    assert one.outputs[0].finish_reason == "length" and one.outputs[0].logprobs is None
    assert two.outputs[0].token_ids == [7, 9] and two.outputs[0].finish_reason == "stop"
    assert [{t: (lp.logprob, lp.rank) for t, lp in row.items()}
            for row in three.outputs[0].logprobs] == [{4: (-0.5, 1)}] * 2
    assert two.prompt is None and two.prompt_token_ids == [7, 9, 8] and two.num_cached_tokens == 3


def test_many_more_prompts_than_rows():
    with LLM("fake", max_num_seqs=2) as llm:
        prompts = [ids(1 + i % 8) for i in range(100)]
        results = llm.generate(prompts, SamplingParams(max_tokens=2))
    assert [r.outputs[0].token_ids for r in results] == [[1 + i % 8] * 2 for i in range(100)]


BAD_CALLS = [
    ([ids(5), ids()], None, "empty"),
    ([ids(5), ids(100)], None, "outside 0 to 99"),
    (ids(5, True), None, "whole numbers"),
    (ids(5, 6.0), None, "whole numbers"),
    ({"prompt_token_ids": "56"}, None, "one of prompt"),
    ({"prompt": "a", "prompt_token_ids": [5]}, None, "one of prompt"),
    ({"text": "a"}, None, "one of prompt"),
    ([5, 6, 7], None, "prompt_token_ids"),
    (5, None, "prompt_token_ids"),
    ("text", None, "no tokenizer"),
    ([ids(5)], [SamplingParams()] * 2, "a list of 1"),
    ([ids(5)], {"temperature": 0}, "a list of 1"),
    (ids(5), SamplingParams(temperature="hot"), "temperature"),
    (ids(5), SamplingParams(top_p=2.0), "top_p"),
    (ids(5), SamplingParams(stop="END"), "stop_token_ids"),
]


def test_a_bad_call_is_a_request_error_and_starts_nothing():
    with LLM("fake") as llm:
        for prompts, params, message in BAD_CALLS:
            with pytest.raises(RequestError, match=message):
                llm.generate(prompts, params)
        assert stats(llm)["generation_tokens_total"] == 0


def test_one_refused_request_ends_the_call_and_the_others():
    with LLM("fake") as llm:
        with pytest.raises(RequestError, match="can never fit"):
            llm.generate([ids(14), ids(15)], LONG)
        eventually(lambda: stats(llm)["rows_used"] == 0)


def test_prompts_and_parameters_take_the_forms_that_users_write():
    assert text_or_ids("a") == text_or_ids({"prompt": "a"}) == "a"
    assert text_or_ids({"prompt_token_ids": (1, 2)}) == [1, 2]
    assert checked_types(SamplingParams(stop="END")).stop == ("END",)
    assert checked_types(SamplingParams(stop=["a", "b"], stop_token_ids=[1])).stop == ("a", "b")
    hi = [{"role": "user", "content": "hi"}]
    assert conversations(hi) == [hi] and conversations([hi, hi]) == [hi, hi]
    for wrong in ([], "hi", [hi, {"role": "user"}], [["hi"], "hi"]):
        with pytest.raises(RequestError, match="messages"):
            conversations(wrong)


def test_chat_needs_a_tokenizer():
    with LLM("fake") as llm:
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}])
        with pytest.raises(RequestError, match="no tokenizer"):
            list(llm.stream_chat([{"role": "user", "content": "hi"}]))


def test_a_stream_gives_tokens_as_they_come_and_leaving_it_frees_the_row():
    with LLM("fake") as llm:
        deltas = list(llm.stream(ids(5, 6), SamplingParams(max_tokens=3)))
        assert [t for d in deltas for t in d.token_ids] == [5, 6, 5]
        assert [d.finish_reason for d in deltas][-1] == "length"
        for delta in llm.stream(ids(14), LONG):
            assert delta.token_ids
            break
        eventually(lambda: stats(llm)["rows_used"] == 0)


def test_a_ctrl_c_ends_the_call_and_not_the_engine():
    with LLM("fake") as llm:
        client = llm._inner._client

        def interrupt():
            eventually(lambda: client.num_running > 0)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        for call in (lambda: llm.generate([ids(14)] * 100, LONG),
                     lambda: list(llm.stream(ids(14), LONG))):
            thread = threading.Thread(target=interrupt)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                call()
            thread.join()
            eventually(lambda: client.num_running + client.num_waiting == 0)
            eventually(lambda: stats(llm)["rows_used"] == 0)
        assert llm.generate(ids(5), SamplingParams(max_tokens=1))[0].outputs[0].token_ids == [5]


def test_a_ctrl_c_while_the_model_loads_leaves_no_process(monkeypatch):
    clients = []

    def slow(*args, **kwargs):
        sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
        clients.append(EngineClient(*args, argv=sleeper, **kwargs))
        return clients[0]

    monkeypatch.setattr(library, "EngineClient", slow)

    def interrupt():
        eventually(lambda: clients and clients[0]._process is not None)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        LLM("fake")
    thread.join()
    assert clients[0]._process.returncode == -signal.SIGKILL


def test_a_dead_engine_is_an_error_of_the_call():
    with LLM("fake") as llm:
        stream = llm.stream(ids(14), LONG)
        next(stream)
        os.kill(llm._inner._client._process.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="signal 9"):
            list(stream)
        with pytest.raises(EngineDied):
            llm.generate(ids(5))


def test_the_engine_goes_with_the_object(monkeypatch):
    monkeypatch.setattr("penstock.engine.client.client.EXIT_GRACE_S", 60.0)     # however busy the machine is
    llm = LLM("fake")
    process = llm._inner._client._process
    del llm
    gc.collect()
    eventually(lambda: process.poll() is not None)
    assert process.returncode == 0


def test_closing_twice_is_fine_and_using_it_after_is_not():
    llm = LLM("fake")
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(ids(5))
    with pytest.raises(RuntimeError, match="closed"):
        next(llm.stream(ids(5)))


def test_config_errors_come_from_the_constructor():
    with pytest.raises(ConfigError, match="no such folder"):
        LLM("missing")
    with pytest.raises(ConfigError, match="is a flag of penstock serve"):
        LLM("fake", data_parallel_size=2)
    with pytest.raises(ConfigError, match="max-num-seqz"):
        LLM("fake", max_num_seqz=2)
    with LLM("fake", tensor_parallel_size=1, max_running_requests=3) as llm:
        assert llm.config.schedule.max_num_seqs == 3


def test_the_async_form():
    async def go():
        async with AsyncLLM("fake") as llm:
            a, b = await asyncio.gather(
                llm.generate(ids(5), SamplingParams(max_tokens=2)),
                llm.generate([ids(6), ids(7)], SamplingParams(max_tokens=1), use_tqdm=True))
            assert [r.outputs[0].token_ids for r in a + b] == [[5, 5], [6], [7]]
            got = [d.token_ids async for d in llm.stream(ids(5), SamplingParams(max_tokens=2))]
            assert [t for tokens in got for t in tokens] == [5, 5]
            task = asyncio.create_task(llm.generate([ids(14)] * 50, LONG))
            while not llm._client.num_running:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert llm._client.num_running + llm._client.num_waiting == 0
            while (await llm._client.stats())["rows_used"]:
                pass
        with pytest.raises(EngineDied):
            await llm.generate(ids(5))
    asyncio.run(asyncio.wait_for(go(), 60))


def test_it_must_be_started():
    with pytest.raises(RuntimeError, match="start"):
        asyncio.run(AsyncLLM("fake").generate(ids(5)))


def test_the_callers_process_never_imports_torch():
    code = ("import sys, penstock; assert 'msgspec' not in sys.modules; "
            "from penstock import LLM, AsyncLLM, SamplingParams, ConfigError; "
            "import penstock.cli.commands; "
            "assert 'torch' not in sys.modules and 'numpy' not in sys.modules; "
            "assert set(penstock.__all__) <= set(dir(penstock))")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_ctrl_c_before_the_call_has_its_future_still_ends_the_work(monkeypatch):
    # Seen on a busy machine: the other thread had begun, this one did not know its future yet.
    real = asyncio.run_coroutine_threadsafe

    def interrupted(work, loop):
        future = real(work, loop)
        if "_Call" in work.__qualname__:
            monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", real)
            eventually(lambda: llm._inner._client.num_running > 0)
            raise KeyboardInterrupt
        return future

    with LLM("fake") as llm:
        for call in (lambda: llm.generate([ids(14)] * 3, LONG),
                     lambda: list(llm.stream(ids(14), LONG))):
            monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call()
            eventually(lambda: llm._inner._client.num_running == 0)
            eventually(lambda: stats(llm)["rows_used"] == 0)


def test_a_smaller_cpu_is_the_engines_and_not_the_callers(monkeypatch):
    from penstock.engine import process as engine_main
    from penstock.engine.record import EventLog
    from penstock.exec.start import build

    def build_engine(*_, **__):
        raise ConfigError(os.environ["ATEN_CPU_CAPABILITY"])
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.setenv(name, "as it was")
    config = AsyncLLM("fake", cpu_isa="plain").config
    assert os.environ["ATEN_CPU_CAPABILITY"] == "as it was"         # the next engine may use all of the CPU
    monkeypatch.setattr(build, "build_engine", build_engine)
    with pytest.raises(ConfigError, match="default"):
        engine_main.build(config, EventLog())


def test_a_program_with_many_open_files_has_an_engine_too(tmp_path):
    """The engine's descriptors are numbers above 1,023 then, which select(2) does not take."""
    files = [open(tmp_path / "file", "w") for _ in range(1030)]
    try:
        with LLM("fake") as llm:
            assert llm.generate([ids(1, 2, 3)], SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    finally:
        for file in files:
            file.close()
