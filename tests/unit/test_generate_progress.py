"""Progress of `penstock generate`: on stderr, in a form for who reads it."""
from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace

from penstock.cli.commands import ProgressLine, answers
from penstock.config.base.errors import RequestError
from penstock.config.request.params import SamplingParams


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Model:
    config = SimpleNamespace(schedule=SimpleNamespace(max_num_seqs=4))

    async def generate(self, asked, params):
        await asyncio.sleep(0.05)
        if not asked["prompt"]:
            raise RequestError("empty", "prompt")
        return [SimpleNamespace(outputs=[SimpleNamespace(text="a", token_ids=[1, 2], finish_reason="stop")],
                                prompt_token_ids=[1], num_cached_tokens=0)]


def written(out: io.StringIO, prompts: list[str], **options) -> str:
    async def run() -> None:
        progress = ProgressLine(len(prompts), out, **options)
        async with progress:
            async for _ in answers(Model(), [{"prompt": p} for p in prompts], SamplingParams(), progress.add):
                pass

    asyncio.run(run())
    return out.getvalue()


def test_progress_on_a_terminal_is_one_line_with_the_last_numbers():
    shown = written(Terminal(), ["a", "", "b"], interval_s=0.01)
    first, *_, last = shown.split("\r")[1:]
    assert first.startswith("penstock: 0 of 3 requests done, 0.0 tokens/s") and shown.count("\n") == 1
    assert last.startswith("penstock: 3 of 3 requests done, ") and not last.startswith("0.0", 32)


def test_progress_in_a_file_is_whole_lines_and_few():
    lines = written(io.StringIO(), ["a", "b"], interval_s=0.01).splitlines()
    assert lines and all(line.startswith("penstock: 0 of 2 requests done") for line in lines[:2])
    assert written(io.StringIO(), ["a", "b"]) == "", "one each 10 s"


def test_progress_of_one_request_or_beside_its_answers_is_silent():
    assert written(Terminal(), ["a"], interval_s=0.01) == ""
    assert written(Terminal(), ["a", "b"], shares=True, interval_s=0.01) == ""
