"""The formats of calls: which is a model's own, by its chat template, and grammars over it."""
from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from penstock.config.request.grammar import Grammar
from penstock.text.tools.formats import (
    deepseek_v3,
    gemma4,
    glm,
    harmony,
    hermes,
    invokes,
    kimi_k2,
    llama3_json,
    minimax_m3,
    mistral,
    qwen3_coder,
)
from penstock.text.tools.lark import Lark, TokenId
from penstock.text.tools.parameters import Schemas
from penstock.text.tools.reasoning import THINK, Marks
from penstock.text.tools.source import Read, Reading, Source


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """read      items of an answer
    body      the expression of calls behind `opening`, of one or many
    opening   the mark that begins calls, "" where the whole answer is one
    signs     of which each is in the templates of its models
    special   marks that must reach the parser, also where they are special tokens
    ends_reasoning   its models may open calls within reasoning, which ends it
    channels  `read` reads the whole answer, with its reasoning, as `harmony` does
    """

    name: str
    read: Read
    body: Callable[[Lark, Schemas, bool], str]
    opening: str
    signs: tuple[str, ...]
    special: tuple[str, ...] = ()
    call_id: Callable[[], str] = _call_id
    ends_reasoning: bool = False
    channels: bool = False


QWEN, SEED = qwen3_coder.QWEN, qwen3_coder.SEED
MINIMAX, DEEPSEEK = invokes.MINIMAX, invokes.DEEPSEEK
_V3 = (deepseek_v3.OPEN, deepseek_v3.CLOSE, deepseek_v3.CALL, deepseek_v3.SEP, deepseek_v3.END)
# The first whose signs a template has is meant.
FORMATS = {f.name: f for f in (
    CallFormat("gpt_oss", harmony.read, harmony.body, "", (harmony.CHANNEL, harmony.MESSAGE), harmony.MARKS,
           channels=True),
    CallFormat("deepseek_v32", DEEPSEEK.read, DEEPSEEK.body, DEEPSEEK.open, (DEEPSEEK.prefix,), (DEEPSEEK.prefix,)),
    CallFormat("kimi_k2", kimi_k2.read, kimi_k2.body, kimi_k2.OPEN, (kimi_k2.OPEN,),
           (kimi_k2.OPEN, kimi_k2.CLOSE, kimi_k2.CALL, kimi_k2.ARGS, kimi_k2.END), ends_reasoning=True),
    CallFormat("deepseek_v3", deepseek_v3.read, deepseek_v3.body_v3, deepseek_v3.OPEN,
           (deepseek_v3.OPEN, deepseek_v3.FENCE), _V3),
    CallFormat("deepseek_v31", deepseek_v3.read, deepseek_v3.body_v31, deepseek_v3.OPEN, (deepseek_v3.OPEN,),
           _V3),
    CallFormat("minimax_m3", minimax_m3.read, minimax_m3.body, minimax_m3.MARK, (minimax_m3.MARK,), (minimax_m3.MARK,)),
    CallFormat("minimax_m2", MINIMAX.read, MINIMAX.body, MINIMAX.open, (MINIMAX.open,), (MINIMAX.open, MINIMAX.close)),
    CallFormat("seed_oss", SEED.read, SEED.body, SEED.open, (SEED.open,), (SEED.open, SEED.close)),
    CallFormat("gemma4", gemma4.read, gemma4.body, gemma4.OPEN, (gemma4.OPEN, gemma4.QUOTE),
               (gemma4.OPEN, gemma4.CLOSE, gemma4.QUOTE)),
    CallFormat("glm", glm.read, glm.body, glm.OPEN, ("<arg_key>",),
           (glm.OPEN, glm.CLOSE, glm.KEY, glm.KEY_END, glm.VALUE, glm.VALUE_END)),
    CallFormat("qwen3_coder", QWEN.read, QWEN.body, QWEN.open, (QWEN.open, qwen3_coder.FUNCTION),
           (QWEN.open, QWEN.close)),
    CallFormat("mistral", mistral.read, mistral.body, mistral.OPEN, ("[TOOL_CALLS]",),
           (mistral.OPEN, mistral.ARGS, mistral.CALL_ID), mistral.call_id),
    CallFormat("hermes", hermes.read, hermes.body, hermes.OPEN, ("<tool_call>",),
           (hermes.OPEN, hermes.CLOSE)),
    CallFormat("llama3_json", llama3_json.read, llama3_json.body, "", ("<|start_header_id|>", "tools"),
           (llama3_json.TAG,)),
)}


def format_of(template: str) -> CallFormat | None:
    """Return the call format of the model that has this chat template."""
    return next((f for f in FORMATS.values() if all(s in template for s in f.signs)), None)


def plain(source: Source) -> Reading:
    """Text, whatever is in it."""
    yield from source.until()


def calls_grammar(form: CallFormat, tools: Schemas, token_id: TokenId, *, required: bool, many: bool,
                  reasoning: bool | None, text: Grammar | None = None, marks: Marks = THINK) -> Grammar:
    """Return the grammar of an answer that is calls, or, unless `required`, text and then maybe calls; or calls, or
    what matches `text`. reasoning: as in `grammar_behind_reasoning`, None where there is none. Raises
    RequestError."""
    lark = Lark(token_id)
    body = lark.rule(form.body(lark, tools, many))
    called = f"{lark.blanks()} {lark.mark(form.opening)} {body}" if form.opening else body
    if required:
        start = called
    elif text is not None:
        start = f"({called} | @answer)"
    elif form.opening:
        start = f"({lark.until(form.opening)} {body} | {lark.without(form.opening)})"
    else:
        start = f"({body} | {lark.no_object()})"
    source = lark.source(f"{'' if reasoning is None else _reasoning(lark, reasoning, marks)} {start}")
    if required or text is None:
        return Grammar("lark", source)
    return msgspec.structs.replace(text, before=source)


def grammar_behind_reasoning(grammar: Grammar, token_id: TokenId, within: bool,
                             marks: Marks = THINK) -> Grammar:
    """`grammar` for what comes behind reasoning; not `within`: there may be none."""
    lark = Lark(token_id)
    return msgspec.structs.replace(grammar, before=lark.source(f"{_reasoning(lark, within, marks)} @answer"))


def channels_grammar(tools: Schemas, token_id: TokenId, *, required: bool, header: str,
                     text: Grammar | None = None) -> Grammar:
    """Return the grammar of an answer of `harmony`: reasoning, then a call of `tools` or, unless `required`, text,
    which matches `text` if that is given. header: of the message within which the prompt ends. Raises
    RequestError."""
    lark = Lark(token_id)
    source = lark.source(harmony.answer(lark, tools, required=required, text=text is not None and not required,
                                        header=header))
    if required or text is None:
        return Grammar("lark", source)
    return msgspec.structs.replace(text, before=source)


def _reasoning(lark: Lark, within: bool, marks: Marks) -> str:
    closed = f"{lark.until(marks.close)} {lark.blanks()}"
    label = lark.text(marks.label) if marks.label else ""
    return closed if within else f"({lark.blanks()} {lark.mark(marks.open)} {label} {closed})?"
