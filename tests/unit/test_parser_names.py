"""The names that SGLang and vLLM have for parsers of calls and of reasoning are taken, or refused by name."""
from __future__ import annotations

import shlex
from typing import get_args

import pytest

from penstock.config.base.errors import ConfigError
from penstock.config.settings import peers
from penstock.config.settings.cli import Parser, add_flags, config_from, prepare
from penstock.config.settings.tree import Config, ReasoningParser, ToolCallParser
from penstock.text.tools.reasoning import MARKS
from penstock.text.tools.table import FORMATS


def parse(line: str) -> Config:
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    return config_from(parser.parse(prepare(shlex.split(line))))


# Names of a card's command, and ours.
NAMES = """
hermes qwen3 | hermes think
qwen25 qwen3-thinking | hermes think
deepseek_v3 deepseek-r1 | deepseek_v3 think
deepseekv3 deepseek_r1 | deepseek_v3 think
deepseek-v3 deepseek_v3 | deepseek_v3 think
deepseekv31 deepseek-v3 | deepseek_v31 think
deepseek_v31 deepseek_v3 | deepseek_v31 think
deepseekv32 deepseek-v3 | deepseek_v32 think
glm glm45 | glm think
glm45 glm45 | glm think
glm47 glm45 | glm think
kimi_k2 kimi_k2 | kimi_k2 think
mistral mistral | mistral mistral
minimax_m2 minimax_m2 | minimax_m2 think
minimax-m2 minimax-append-think | minimax_m2 minimax_m2_append_think
minimax_m2 minimax_m2_append_think | minimax_m2 minimax_m2_append_think
step3p5 step3p5 | qwen3_coder think
qwen3_coder nemotron_v3 | qwen3_coder think
qwen3_xml qwen3 | qwen3_coder think
mimo mimo | qwen3_coder think
seed_oss seed_oss | seed_oss seed_oss
llama3_json none | llama3_json none
llama3 kimi | llama3_json kimi_vl
gemma4 gemma4 | gemma4 gemma4
none minimax_m3 | none minimax_m3
minimax_m3 minimax-m3 | minimax_m3 minimax_m3
openai openai_gptoss | gpt_oss gpt_oss
gpt-oss gpt-oss | gpt_oss gpt_oss
auto auto | auto auto
"""


@pytest.mark.parametrize("names", NAMES.strip().splitlines())
def test_a_cards_command_names_parsers_of_ours(names):
    calls, marks, _, *ours = names.split()
    line = f"demo --enable-auto-tool-choice --tool-call-parser {calls} --reasoning-parser {marks}"
    assert [parse(line).model.tool_call_parser, parse(line).model.reasoning_parser] == ours


@pytest.mark.parametrize("flag", ["tool-call-parser", "reasoning-parser"])
@pytest.mark.parametrize("name", ["granite", "hunyuan_a13b", "ernie45"])
def test_what_is_not_read_is_refused_by_name(flag, name):
    with pytest.raises(ConfigError, match=rf"--{flag} {name}: .* not read here: leave the flag out"):
        parse(f"demo --{flag} {name}")


@pytest.mark.parametrize("name", ["pythonic", "xlam", "minimax", "jamba", "functiongemma"])
def test_formats_of_calls_that_are_not_read_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=r"--tool-call-parser .*requests with tools are then refused"):
        parse(f"demo --tool-call-parser={name}")


def test_another_name_says_what_there_is():
    with pytest.raises(ConfigError, match="--reasoning-parser tinker: choose from auto, none, think"):
        parse("demo --reasoning-parser tinker")


def test_every_name_leads_to_a_parser_that_is_there():
    assert {*get_args(ToolCallParser)} == {"auto", "none", *FORMATS}
    assert {*get_args(ReasoningParser)} == {"auto", "none", *MARKS}
    for field, parsers in (("tool_call_parser", FORMATS), ("reasoning_parser", MARKS)):
        names = [n for of in peers._PARSERS[field].values() for n in of]
        assert len({*names}) == len(names) and not {*names} & peers._NOT_READ[field]
        assert {*peers._PARSERS[field]} <= {*parsers} and not {*names} & {*parsers}
