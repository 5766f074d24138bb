"""The text side of a model: tokenizer, chat template, stop ids. Opened from the model's files.

Owns how a prompt or a conversation becomes token ids. Knows no engine; imports no torch.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.request.defaults import Sampling, overrides, sampling_of
from penstock.config.request.grammar import Grammar
from penstock.config.request.params import SamplingParams
from penstock.config.settings.plain import object_of
from penstock.config.settings.tree import Config, ModelConfig
from penstock.model.weights.files import read_json_object
from penstock.model.weights.locate import ModelFiles
from penstock.text.chat import ONLY_TEXT, RESERVED, ChatTemplate, read_template
from penstock.text.grammar.check import GrammarCheck
from penstock.text.prompts import program_of
from penstock.text.tokenizer import Tokenizer, open_tokenizer
from penstock.text.tools.asked import AnswerForm, ToolOffer, asked_of
from penstock.text.tools.reasoning import MARKS, Marks, marks_of
from penstock.text.tools.table import FORMATS, CallFormat, format_of

_TOOLS_ALONE = "{{ raise_exception('this model has a chat template for requests with tools alone') }}"


class ModelText:
    """`tokenizer` is None for a model that has none: it serves token ids. `no_template`: why there is no
    template, as the beginning of a sentence. `calls`: the format of its calls of tools, or None; `reasons`:
    the marks of the reasoning that its answers may begin with, or None."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None,
                 eos_ids: Sequence[int], no_template: str = "this model has no chat template", *,
                 calls: CallFormat | None = None, reasons: Marks | None = None,
                 sampling: Sampling | None = None) -> None:
        """sampling: values of requests that name none."""
        self.sampling = sampling or {}
        self.calls, self.reasons = calls, reasons
        self.no_template = no_template
        self.tokenizer = tokenizer
        self.eos_ids = tuple(eos_ids)
        self.template = template
        self.grammars = None if tokenizer is None else GrammarCheck(tokenizer)

    async def check(self, params: SamplingParams, tenant: bytes = b"") -> None:
        """Whether the grammar, if there is one, can be compiled. Raises RequestError, TooManyTexts."""
        if params.grammar is not None:
            if self.grammars is None:
                raise RequestError("this model has no tokenizer: a grammar needs one", "grammar")
            await self.grammars.check(params.grammar, tenant)

    def asked(self, offer: ToolOffer, prompt: str, *, separate: bool = True) -> AnswerForm:
        """How answers to `prompt` are read. Raises RequestError: this model does not know of tools."""
        if offer.tools and self.calls is None:
            raise RequestError("tools: this model's calls are in no format that is known: name it with "
                               "--tool-call-parser, or leave them out", "tools")
        return asked_of(self.calls, offer, prompt, reasons=self.reasons, separate=separate)

    def shown(self, asked: AnswerForm) -> frozenset[int]:
        """Special tokens that readers of such answers must see."""
        if self.tokenizer is None or asked.plain:
            return frozenset()
        return frozenset(i for mark in asked.marks() if (i := self.tokenizer.mark_id(mark)) is not None)

    def grammar(self, asked: AnswerForm, given: Grammar | None) -> Grammar | None:
        """Return the grammar of such answers, where `given` is what their text must match. Raises RequestError."""
        return given if self.tokenizer is None else asked.grammar(self.tokenizer.mark_id, given)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the model wants around a prompt. Raises RequestError."""
        if self.tokenizer is None:
            raise RequestError('this model has no tokenizer: send {"prompt_token_ids": [...]}',
                               "prompts")
        return self.tokenizer.encode(text, add_special=special)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation. Raises RequestError."""
        if self.tokenizer is None:
            raise RequestError('this model has no tokenizer: use generate with {"prompt_token_ids": [...]}',
                               "messages")
        if self.template is None:
            raise RequestError(f"{self.no_template}: use generate, or give one with "
                               "chat_template (--chat-template)", "messages")
        return self.template.render(messages)

    def token(self, token: int) -> str:
        """Text of one token id; half a character shows as U+FFFD."""
        return "" if self.tokenizer is None else self.tokenizer.token_text(token)

    def close(self) -> None:
        """End the processes of the template and of grammars."""
        if self.grammars is not None:
            self.grammars.close()
        if self.template is not None:
            self.template.close()


def open_text(config: Config, files: ModelFiles) -> ModelText:
    """Raises ConfigError: the tokenizer or the operator's template is missing or broken."""
    model = config.model
    tokenizer = open_tokenizer(files, model.tokenizer)
    source = with_tools = None
    if tokenizer is not None:
        source, with_tools = tokenizer.chat_template, tokenizer.tool_template
        if source is None:
            source = program_of(files.config.get("model_type")) if with_tools is None else _TOOLS_ALONE
    if model.chat_template is not None:
        if tokenizer is None:
            raise ConfigError(f"--chat-template {model.chat_template}: {files.name} has no tokenizer for "
                              "what it writes: give one with --tokenizer, or leave it out")
        source, with_tools = read_template(model.chat_template), None
    template = None
    if tokenizer is not None and source is not None:
        only = f"this server runs the text of {files.name}: {ONLY_TEXT}" if files.wrapper else ONLY_TEXT
        template = ChatTemplate(source, {**tokenizer.template_vars, **_defaults(model)}, only=only,
                                with_tools=with_tools)
        if model.chat_template is not None:
            template.check()            # the model's own may be broken: it still continues text
    elif _defaults(model):
        raise ConfigError(f"--default-chat-template-kwargs: {files.name} has no chat template that reads "
                          "them: give one with --chat-template, or leave it out")
    shown = (source or "") + (with_tools or "")
    calls, reasons = parsers(model, shown, files.config.get("model_type"))
    return ModelText(tokenizer, template, files.eos_ids if tokenizer is None else tokenizer.eos_ids,
                _no_template(files), calls=calls, reasons=reasons, sampling=sampling_defaults(model, files))


def parsers(model: ModelConfig, template: str, model_type: object) -> tuple[CallFormat | None, Marks | None]:
    """Return how calls and reasoning are read: as the flags say, else as the template shows, or the model's
    type where it shows nothing. Raises ConfigError: the flags contradict each other."""
    calls, reasons = format_of(template), marks_of(template)
    if calls is None and reasons is None and model_type == "gpt_oss":
        calls, reasons = FORMATS["gpt_oss"], MARKS["gpt_oss"]
    if model.tool_call_parser != "auto":
        calls = FORMATS.get(model.tool_call_parser)
    if model.reasoning_parser != "auto":
        reasons = MARKS.get(model.reasoning_parser)
    if calls is not None and reasons is not None and calls.channels != reasons.channels:
        raise ConfigError(f"--tool-call-parser {model.tool_call_parser} and --reasoning-parser "
                          f"{model.reasoning_parser}: gpt_oss reads calls and reasoning as one: give it to both, or "
                          "none to the other")
    return calls, reasons


def sampling_defaults(model: ModelConfig, files: ModelFiles) -> Sampling:
    """Sampling values of requests that name none: the model's, and the operator's before those. Raises
    ConfigError."""
    asked, found = model.generation_config, {}
    if asked not in ("none", "vllm"):
        given, where = files.generation_config, files.folder
        if asked != "auto":
            where = Path(asked).expanduser()
            if not (where / "generation_config.json").is_file():
                raise ConfigError(f"--generation-config {asked}: {where} has no generation_config.json: give "
                                  "auto (the model's), none, or a folder that has one")
            given = read_json_object(where / "generation_config.json", 4 << 20)
        try:
            found = sampling_of(given, f"{where}/generation_config.json")
        except ConfigError as e:
            raise ConfigError(f"{e}: correct it, or start with --generation-config none") from None
    return found | overrides(model.override_generation_config)


def _defaults(model: ModelConfig) -> dict[str, Any]:
    """Return the values of --default-chat-template-kwargs. Raises ConfigError: a name that the server fills in."""
    given = object_of(model.default_chat_template_kwargs) or {}
    if taken := sorted(RESERVED & set(given)):
        raise ConfigError(f"--default-chat-template-kwargs: {taken[0]} is filled in for each request: leave "
                          "it out")
    return given


def _no_template(files: ModelFiles) -> str:
    """Name the program that a folder brings in place of a template, which nothing here runs."""
    why = "this model has no chat template"
    for own in sorted((files.folder / "encoding").glob("encoding_*.py")):
        return f"{why} but a program, encoding/{own.name}, which is not supported"
    return why
