"""The HTTP app over an engine that says what a test tells it to, in pieces of some tokens; no socket."""
from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from tokenizers import AddedToken

from penstock.api.app import Health, build_app
from penstock.api.completions import OpenAI
from penstock.api.limits import Keys
from penstock.config.settings.tree import ServerConfig
from penstock.engine.client.client import checked_limits
from penstock.engine.client.metrics import Metrics
from penstock.engine.wire import NO_ORIGIN, EngineReady, OutputChunk, TokenLogprob
from penstock.text.chat import ChatTemplate
from penstock.text.encoder import Encoder
from penstock.text.model_text import ModelText
from penstock.text.prompts import program_of
from penstock.text.tokenizer import Tokenizer
from penstock.text.tools.reasoning import THINK, marks_of
from penstock.text.tools.table import FORMATS, format_of

DATA = Path(__file__).parents[1] / "data"
_spec = importlib.util.spec_from_file_location(
    "tokenizers_fake", Path(__file__).parents[1] / "unit" / "tokenizers_fake.py")
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)
TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Now.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"], "additionalProperties": False}}}
ARGUMENTS = {"city": "Paris", "days": 2}
SAYS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
                   "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
                    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
                    '<｜DSML｜parameter name="days" string="false">2</'
                    "｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
               '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
               "<|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
                   '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
                    '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n'
                  '<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n'
                  "</invoke>\n</minimax:tool_call>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris'
                  "]<]minimax[>[</city>]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[</invoke>\n"
                  "]<]minimax[>[</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
                "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
    "gpt_oss": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
               '{"city": "Paris", "days": 2}',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
           "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
}


def template(name: str) -> str:
    """A family's form of a conversation, as short as it can be; ours, where its models have no template."""
    file = {"deepseek_v3": "deepseek_r1"}.get(name, name)
    return program_of(name) or (DATA / "templates" / f"{file}.jinja").read_text()


class _Stream:
    rid = 1

    def __init__(self, chunks: list[OutputChunk]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[OutputChunk]:
        for chunk in self._chunks:
            await asyncio.sleep(0)
            yield chunk

    def here(self) -> OutputChunk | None:
        return None

    def stop_at(self, count: int) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Scripted:
    """An app whose model says `says`, whatever it is asked. Of the last: `params`, `prompt`, `tenant`.

    marks   a tokenizer in which the format's marks are one token each
    """

    num_waiting = num_running = 0
    peer_missing = ""

    def __init__(self, source: str, *, size: int = 3, marks: bool = True, keys: Keys | None = None,
                 context: int = 32_768, sampling: dict[str, float] | None = None, **api) -> None:
        raw, form, reasons = fake.byte_level(), format_of(source), marks_of(source)
        around = reasons or THINK
        special = (*form.special, around.open, around.close) if form in FORMATS.values() else ()
        if marks:
            raw.add_tokens([AddedToken(m, special=not m.startswith("｜"), normalized=False)
                            for m in special])
        self.tokenizer = Tokenizer(raw, eos_ids=(raw.token_to_id(fake.EOS),), chat_template=source, template_vars={})
        self.eos = self.tokenizer.eos_ids[0]
        self.ready = EngineReady(pid=1, vocab_size=raw.get_vocab_size(), max_model_len=context,
                           info={"grammar_backend": "llguidance"})
        self.says, self.finish, self.size = "", "stop", size
        made = ChatTemplate(source, {"bos_token": "", "eos_token": fake.EOS})
        self.text = ModelText(self.tokenizer, made, self.tokenizer.eos_ids, calls=form, reasons=reasons,
                         sampling=sampling)
        made_api = OpenAI(self, self.text, Metrics(), model="m", choices_max=8,
                          encoder=Encoder(self.tokenizer), **api)
        self.app = build_app(made_api, Health(), keys or Keys([]), ServerConfig(),
                             {"model": "m", "page_size": 16, "max_num_seqs": 4}, [{}])

    def of(self, rank: int | None) -> Scripted:
        return self

    async def hashed(self, prompt, namespace):
        return prompt

    def submit(self, prompt, params, *, eos_ids=(), namespace=0, room=None, origin=NO_ORIGIN):
        checked_limits(self.ready, prompt, params, eos_ids)
        self.tenant = origin.tenant
        self.prompt, self.params = self.tokenizer.decode(prompt, skip_special=False), params
        ids = self.tokenizer.encode(self.says, add_special=False)
        ids += [self.eos] if self.finish == "stop" else []
        return [_Stream(self._chunks(n, ids)) for n in range(params.n)]

    def _chunks(self, rid: int, ids: list[int]) -> list[OutputChunk]:
        found = []
        for at in range(0, len(ids), self.size):
            tokens = ids[at:at + self.size]
            last = at + self.size >= len(ids)
            found.append(OutputChunk(rid, tokens, at, [TokenLogprob(-1.0, 1, []) for _ in tokens],
                               finish=self.finish if last else None, cached_tokens=None if at else 2))
        return found

    def flush(self) -> None:
        pass

    async def stats(self) -> dict[str, float]:
        return {}

    def post(self, path: str, headers: dict[str, str] | None = None, **body) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await http.post(path, json=body, headers=headers)
        return asyncio.run(go())

    def transport(self) -> httpx.ASGITransport:
        """For a client that takes one."""
        return httpx.ASGITransport(app=self.app)

    def close(self) -> None:
        self.text.close()


def events(answer: httpx.Response) -> list[dict]:
    """Data of a stream, without its end."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    data = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(d) for d in data if d != "[DONE]"]
