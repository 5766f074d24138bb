"""Chat messages to prompt text, by the model's own template, in a process of its own.

Owns the limits on templates: size of the source, how many conversations at once, time, and (in `chat_render`)
memory and output.
Knows neither HTTP nor tokens. A template never comes from a request.
"""
from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.config.base.errors import CONTEXT_EXCEEDED, ConfigError, RequestError, cut, show
from penstock.config.request.ignored import OBEYED_ELSEWHERE, OfPart, names
from penstock.text.helper import Aside, HelperDied
from penstock.text.prompts.arguments import WRONG_TYPE, argument_forms, arguments_of, one_call_each
from penstock.text.tools.formats import harmony
from penstock.text.turns import Turns

SOURCE_BYTES_MAX = 256 << 10
RENDER_S_MAX = 10.0
LONG_MESSAGES, LONG_CHARS = 256, 64 << 10       # from here on a conversation is long: over a millisecond
SHORT_MAX, LONG_MAX = 1024, 32                  # conversations that are rendered or wait for it
ROLES = ("system", "developer", "user", "assistant", "tool")
OPTIONAL = ("name", "reasoning", "reasoning_content", "thinking", "tool_calls")     # fields that some templates show
# What the server fills in; `chat_template_kwargs` may not.
ONLY_TEXT = "only text parts are supported"
RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents", "raise_exception",
                      "strftime_now", "tojson", "range", "namespace"})


def read_template(path: str) -> str:
    """Source of the operator's --chat-template. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as f:
            return f.read(SOURCE_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--chat-template {path}: {e}: give a readable UTF-8 Jinja file") from e


class ChatTemplate:
    """A template and the processes that render it, one for long conversations; `render` is thread-safe,
    `take` is for one event loop.

    A process starts with the first `check` or rendering, is killed when it is late, and starts
    again for the next one. `variables` are the model's: bos_token, eos_token and the like.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, *,
                 with_tools: str | None = None, render_s_max: float = RENDER_S_MAX,
                 only: str = ONLY_TEXT) -> None:
        """with_tools: the source for conversations with tools, if that is another one. only: see
        `plain_message`. Raises ConfigError: a source is too large."""
        by_tools = {"source": source, "with_tools": source if with_tools is None else with_tools}
        if with_tools is not None:
            source += with_tools
        if len(source.encode()) > SOURCE_BYTES_MAX:
            raise ConfigError(f"the chat template is over {SOURCE_BYTES_MAX >> 10} KiB: "
                              "give a smaller one with --chat-template")
        self.source, self._variables = source, dict(variables or {})
        self._render_s_max, self.only = render_s_max, only
        self.shown = frozenset(f for f in OPTIONAL if _reads(source, f)) | (
            {"developer"} if re.search(r"""['"]developer['"]""", source) else frozenset()) | (
            {"channels"} if harmony.CHANNEL in source else frozenset())
        self._short, self._long = (
            Aside("penstock.text.chat_render", by_tools,
                  wrong="the chat template is wrong", advice="give another with --chat-template")
            for _ in range(2))
        self._short_turns, self._long_turns = Turns("chat", SHORT_MAX), Turns("chat-long", LONG_MAX)

    def check(self) -> None:
        """Compile it now. Raises ConfigError with the syntax error."""
        self._short.check()

    def reads(self, variable: str) -> bool:
        """Whether it looks at a variable of that name."""
        return re.search(rf"\b{variable}\b", self.source) is not None

    async def take(self, messages: Sequence[Mapping[str, Any]], *, tenant: bytes, context: int,
                   continue_final: bool = False, add_generation_prompt: bool | None = None,
                   variables: Mapping[str, Any] | None = None,
                   tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """`render` in its turn among tenants; no short conversation waits for another tenant's long one.

        Raises   RequestError, also for more messages than the context of the model has tokens; TooManyTexts.
        """
        if len(messages) > context:
            raise too_many_messages(context)
        turns = self._long_turns if is_long([*messages, *tools]) else self._short_turns
        return await turns.run(tenant, lambda: self.render(
            messages, continue_final=continue_final, add_generation_prompt=add_generation_prompt,
            variables=variables, tools=tools))

    def render(self, messages: Sequence[Mapping[str, Any]], *, continue_final: bool = False,
               add_generation_prompt: bool | None = None,
               variables: Mapping[str, Any] | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt text of a conversation.

        messages   {"role", "content"} with content a string or a list of {"type": "text"} parts
        continue_final   the last message, the assistant's, is left open: the model goes on with it
        variables  more names for the template (`chat_template_kwargs`)
        tools      that the model may call, as in a request
        Raises     RequestError: a message of another form, or the template refused or failed.
        """
        plain = [plain_message(m, i, self.shown, self.only) for i, m in enumerate(messages)]
        if "channels" in self.shown:
            plain = one_call_each(plain)
        if not plain:
            raise RequestError("messages is empty: send at least one message", "messages")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final
        if taken := sorted(RESERVED & set(variables or {})):
            raise RequestError(f"chat_template_kwargs may not set {taken[0]}",
                               "chat_template_kwargs")
        mark = ""
        if continue_final:
            if plain[-1]["role"] != "assistant" or add_generation_prompt:
                raise RequestError("continue_final_message needs a last message of the assistant "
                                   "and add_generation_prompt false", "continue_final_message")
            mark = secrets.token_hex(16)
            plain[-1]["content"] += mark
        # As transformers passes them: None where there are none.
        text = self._render_any(self._long if is_long([*messages, *tools]) else self._short,
                                {**self._variables, **(variables or {}), "documents": None,
                                 "tools": list(tools) or None,
                                 "add_generation_prompt": add_generation_prompt}, plain)
        if not continue_final:
            return text
        end = text.rfind(mark)
        if end < 0:
            raise RequestError("this model's chat template does not show the last message: it "
                               "cannot be continued", "continue_final_message")
        return text[:end]

    def close(self) -> None:
        """End the processes. Idempotent."""
        for aside, turns in ((self._short, self._short_turns), (self._long, self._long_turns)):
            turns.close()
            aside.close()

    def _render_any(self, aside: Aside, value: dict[str, Any], plain: list[dict[str, Any]]) -> str:
        """Render with the first form of the calls' arguments that the template can show."""
        first: RequestError | None = None
        for messages in argument_forms(plain):
            try:
                return self._render(aside, {**value, "messages": messages})
            except RequestError as e:
                first = first or e
                if not WRONG_TYPE.search(str(e)):
                    break
        assert first is not None
        raise first

    def _render(self, aside: Aside, value: dict[str, Any]) -> str:
        try:
            answer = aside.ask(value, self._render_s_max)
        except HelperDied:
            raise
        except ConfigError as e:
            raise RequestError(str(e), "messages") from None
        except TimeoutError:
            raise RequestError(f"the chat template took over {self._render_s_max:g} s",
                               "messages") from None
        except EOFError:
            raise RequestError("the chat template used too much memory", "messages") from None
        if "error" in answer:
            why = answer["error"]       # the template's own words, or with a message's in them
            raise RequestError(f"chat template: {cut(why, 300 if why in self.source else 80)}", "messages")
        text: str = answer["text"]
        return text


def too_many_messages(context: int) -> RequestError:
    """The error of a conversation that has more messages than the context has tokens."""
    return RequestError(f"This model's maximum context length is {context} tokens. However, there are more "
                        f"messages than that: reduce the length of the messages ({CONTEXT_EXCEEDED})",
                        "messages", CONTEXT_EXCEEDED, (context + 1, 0, context))


def is_long(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether to render them would keep short conversations waiting."""
    return len(messages) > LONG_MESSAGES or sum(map(_length, messages)) > LONG_CHARS


def _length(value: Any) -> int:
    """Characters of a message or of a part of one, roughly; every item counts as one."""
    if isinstance(value, Mapping):
        return sum(map(_length, value.values()))
    if isinstance(value, list):
        return len(value) if len(value) > LONG_CHARS else sum(map(_length, value))
    return len(value) if isinstance(value, str) else 1


def _reads(source: str, name: str) -> bool:
    """Whether a template looks at `name` of a message: `m.name`, `m['name']`, `m.get("name")`,
    `'name' in m`. The name of a tool or of its function is another one."""
    return re.search(rf"""(?<!tool)(?<!tool_call)(?<!function)(\.|\[['"]|\.get\(['"]){name}\b"""
                     rf"""|['"]{name}['"] +in\b""", source) is not None


def plain_message(message: Mapping[str, Any], index: int, shown: Collection[str] = OPTIONAL,
                  only: str = ONLY_TEXT) -> dict[str, Any]:
    """A message as templates know it: content is one string, arguments are objects, and `developer` is
    `system` unless the template knows that role.

    Names, reasoning and fields that no template knows are dropped where the template does not show them: a
    client may send back whatever an answer had. Calls of tools are not: the answer would miss them.

    shown    fields of OPTIONAL that the template looks at, "developer" if it knows it, "channels" if it
    writes those of gpt-oss
    only     what to say to a part that is not text
    Raises   RequestError that names the message and the field.
    """
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is not an object with role and content", where)
    role = message.get("role")
    if role not in ROLES:
        advice = "use tool, with tool_call_id" if role == "function" else f"one of {', '.join(ROLES)}"
        raise RequestError(f"{where}.role is {show(role)}: {advice}", f"{where}.role")
    if role == "tool" and "tool_calls" not in shown:
        raise RequestError(f"{where}.role is 'tool': this model's chat template shows no calls of tools",
                           f"{where}.role")
    calls = message.get("tool_calls") or None
    for name in (*OBEYED_ELSEWHERE, *(() if role == "assistant" else ("tool_calls",))):
        if message.get(name):
            advice = "use tool_calls" if (name, role) == ("function_call", "assistant") else "leave it out"
            raise RequestError(f"{where}.{name} is not supported in a message of the {role}: {advice}",
                               f"{where}.{name}")
    if calls and "tool_calls" not in shown:
        raise RequestError(f"{where}.tool_calls: this model's chat template does not show it, leave it out",
                           f"{where}.tool_calls")
    content = message.get("content")
    empty = content in ([], None) if role in ("assistant", "tool") else False
    plain = {"role": "system" if role == "developer" and role not in shown else role,
             "content": "" if empty else _plain_content(content, where, only)}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if "channels" in shown and calls and plain["content"] and isinstance(reasoning, str) and reasoning:
        # gpt-oss's template shows text before a call as reasoning, and refuses both.
        reasoning, plain["content"] = f"{reasoning}\n\n{plain['content']}", ""
    for name, value in (("name", message.get("name")), ("reasoning", reasoning), ("thinking", reasoning),
                        ("reasoning_content", reasoning), ("tool_call_id", message.get("tool_call_id"))):
        if value is not None and (name in shown or (role, name) == ("tool", "tool_call_id")):
            if not isinstance(value, str):
                raise RequestError(f"{where}.{name} is not a string", f"{where}.{name}")
            plain[name] = value
    if calls:
        plain["tool_calls"] = _plain_calls(calls, f"{where}.tool_calls")
    return plain


def _plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Their arguments, JSON text in a request, are objects in templates; text that is none stays text. As in
    the peers, a client may send the object itself, or nothing for none."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} is not a list", where)
    found = []
    for i, call in enumerate(calls):
        at = f"{where}[{i}]"
        match call:
            case {"function": {"name": str(name), **function}, **rest} if (
                    rest.get("type", "function") == "function" and isinstance(rest.get("id"), str)
                    and isinstance(given := function.get("arguments") or "", (str, dict))):
                arguments = arguments_of(given) if isinstance(given, str) else given
                found.append({"id": rest["id"], "type": "function",
                              "function": {"name": name, "arguments": arguments}})
            case _:
                raise RequestError(f'{at} is not {{"id": "...", "type": "function", "function": '
                                   '{"name": "...", "arguments": "{...}"}}', at)
    return found


def _plain_content(content: Any, where: str, only: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where}.content is neither a string nor a list of text parts",
                           f"{where}.content")
    texts = []
    for i, part in enumerate(content):
        at = f"{where}.content[{i}]"
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise RequestError(f"{at} is not an object with a type", at)
        if part["type"] == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])               # what an assistant said instead
            continue
        if part["type"] != "text":
            raise RequestError(f"{at}.type is {show(part['type'])}: {only}",
                               f"{at}.type")
        if not isinstance(part.get("text"), str):
            raise RequestError(f'{at} is not {{"type": "text", "text": "..."}}', at)
        if unknown := sorted(set(part) - {"type", "text"} - names(OfPart)):
            raise RequestError(f"{at}.{cut(unknown[0])} is not a field of a text part",
                               f"{at}.{cut(unknown[0])}")
        texts.append(part["text"])
    return "\n".join(texts)              # as vLLM joins them
