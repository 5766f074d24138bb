"""Formats of calls: what a family's template writes is read as what it was made of, however it is cut."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.chat import plain_message
from penstock.text.chat_render import compile_template, render
from penstock.text.prompts import program_of
from penstock.text.prompts.arguments import argument_forms
from penstock.text.tools.reasoning import MARKS, THINK, behind_reasoning, marks_of
from penstock.text.tools.source import AnswerReader, Arguments, CallBegun, CallEnded, Reasoning, TextItem
from penstock.text.tools.table import FORMATS, format_of, plain

FOLDER = Path(__file__).parents[1] / "data" / "templates"
TEMPLATES = {**{p.stem: p.read_text() for p in FOLDER.glob("*.jinja")},
             "deepseek_v32": program_of("deepseek_v32")}
TEMPLATES["deepseek_v3"] = TEMPLATES["deepseek_r1"]
# Template beside that of the format's name: for the same format, of other models.
OTHERS = {"mistral_args": "mistral", "hermes3": "hermes", "glm47": "glm", "llama31": "llama3_json",
          "deepseek_r1": "deepseek_v3"}
COMPILED = {name: compile_template(source) for name, source in TEMPLATES.items()}
REASONS = ("deepseek_v32", "glm", "gpt_oss", "hermes")
END = {"hermes": "<|im_end|>\n", "qwen3_coder": "<|im_end|>\n", "llama3_json": "<|eot_id|>",
       "mistral": "</s>", "deepseek_v32": "<｜end▁of▁sentence｜>", "glm": "", "gpt_oss": "", "kimi_k2": "<|im_end|>",
       "deepseek_v3": "<｜end▁of▁sentence｜>", "deepseek_v31": "<｜end▁of▁sentence｜>",
       "minimax_m2": "[e~[\n", "minimax_m3": "[e~[\n", "seed_oss": "</s>", "gemma4": "<turn|>\n"}
# What comes before an answer of a template that drops the reasoning which its prompts open.
BEFORE = {"deepseek_v3": "<｜Assistant｜>", "minimax_m2": "]~b]ai\n"}
TYPED = {"text": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": "number"},
         "really": {"type": "boolean"}, "nothing": {"type": "null"}, "either": {"type": ["string", "null"]},
         "items": {"type": "array"}, "more": {"type": "object"}, "referred": {"$ref": "#/$defs/word"}}
SCHEMA = {"type": "object", "properties": TYPED, "$defs": {"word": {"type": "string"}}}
TOOLS = {"get_weather": SCHEMA, "f": SCHEMA, "a-b.c": {}}
# What no format can carry: marks. Lone surrogates are no text.
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<｜["), max_size=12)
STRIPPED = WORDS.map(str.strip)
VALUES = {
    "text": WORDS, "count": st.integers(-10**9, 10**9), "ratio": st.floats(-1e6, 1e6),
    "really": st.booleans(), "nothing": st.none(), "either": st.none() | WORDS.map("x".__add__),
    "referred": WORDS,
    "items": st.lists(st.integers() | WORDS | st.booleans(), max_size=3),
    "more": st.dictionaries(WORDS, st.integers() | WORDS | st.lists(WORDS, max_size=2), max_size=3)}
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)
# Of tags: an empty list is an empty object and an empty text, where no schema says which.
TAGGED = {**VALUES, "items": st.lists(st.integers() | st.booleans(), max_size=3), "more": st.dictionaries(
    st.sampled_from(["a", "item", "b-c"]), st.integers() | st.lists(st.integers(), min_size=1, max_size=2), max_size=3)}
CALLS, TAGGED_CALLS = (st.lists(st.tuples(st.sampled_from(["get_weather", "f"]), of), max_size=3) for of in (
    ARGUMENTS, st.fixed_dictionaries({}, optional=TAGGED)))


def answer(name: str, content: str, reasoning: str, calls: list) -> tuple[str, str]:
    """The prompt of a question, and what the template writes for its answer."""
    own_id = "functions.{0}:{1}" if name == "kimi_k2" else "abcdefg{1:02}"
    message = {"role": "assistant", "content": content or None if calls else content, "tool_calls": [
        {"id": own_id.format(n, i), "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
        for i, (n, a) in enumerate(calls)]}
    if reasoning:
        message["reasoning_content"] = reasoning
    asked = [{"role": "user", "content": "?"}]
    shared = {"bos_token": "<s>", "eos_token": "</s>", **({"enable_thinking": True} if reasoning else {})}
    if content == "" and not calls:
        message["content"] = ""
    shared["tools"] = None
    prompt = render(COMPILED[name], {**shared, "messages": asked,
                                     "add_generation_prompt": name not in BEFORE}) + BEFORE.get(name, "")
    said = [*asked, plain_message(message, 1)]
    if name in ("deepseek_v3", "deepseek_v31"):             # these join arguments as text
        said = list(argument_forms(said))[1] if calls else said
        if not calls:
            said[1]["tool_calls"] = None
    whole = render(COMPILED[name], {**shared, "add_generation_prompt": False, "messages": said})
    assert whole.startswith(prompt) and whole.endswith(END[name]), (prompt, whole)
    return prompt, whole[len(prompt):].removesuffix(END[name])


def read(name: str, text: str, sizes: list[int], prompt: str = "", tools: dict = TOOLS) -> list:
    form = FORMATS[name].read
    if name in REASONS and not FORMATS[name].channels:
        form = behind_reasoning(form, within=THINK.begins_within(prompt), separate=True)
    reader, items, at = AnswerReader(form, tools), [], 0
    for i in range(len(text) + 1):
        if at >= len(text):
            break
        size = sizes[i % len(sizes)]
        items += reader.take(text[at:at + size])
        at += size
    return joined([*items, *reader.take("", True)])


def joined(items: list) -> list:
    """Neighbours of one kind as one."""
    found: list = []
    for item in items:
        if found and type(item) is type(found[-1]) and isinstance(item, TextItem | Reasoning | Arguments):
            found[-1] = type(item)(found[-1].text + item.text)
        else:
            found.append(item)
    return found


def called(items: list) -> list[tuple[str, dict]]:
    found, at = [], iter(items)
    for item in at:
        if isinstance(item, CallBegun):
            arguments = next(at)
            assert isinstance(arguments, Arguments) and isinstance(next(at), CallEnded)
            found.append((item.name, json.loads(arguments.text)))
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_template_writes_is_read_as_what_it_was_made_of(name):
    @given(content=STRIPPED, reasoning=STRIPPED if name in REASONS else st.just(""),
           calls=TAGGED_CALLS if name == "minimax_m3" else CALLS,
           sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5))
    @settings(max_examples=200, deadline=None)
    def conversations(content, reasoning, calls, sizes):
        if name == "llama3_json":                   # one call and no text, or text that is no object
            calls, content = calls[:1], "" if calls else content.lstrip("{; ")
        if name == "gpt_oss":                       # its template shows text before a call as reasoning
            calls, content = calls[:1], "" if calls else content
        if name == "mistral":
            content = "" if calls else content
        if name == "minimax_m2":
            content = content.strip("\n")
        prompt, text = answer(name, content, reasoning, calls)
        items = read(name, text, sizes, prompt)
        assert items == read(name, text, [10**6], prompt)
        assert called(items) == calls
        assert "".join(i.text for i in items if isinstance(i, TextItem)).strip() == content
        assert "".join(i.text for i in items if isinstance(i, Reasoning)) == reasoning
    conversations()


@pytest.mark.parametrize("name", FORMATS)
def test_a_models_own_format_is_known_by_its_template(name):
    assert format_of(TEMPLATES[name]) is FORMATS[name]


@pytest.mark.parametrize("other, name", OTHERS.items())
def test_another_models_template_of_the_same_format_is_known(other, name):
    assert format_of(TEMPLATES[other]) is FORMATS[name]


def test_a_template_without_calls_has_no_format():
    assert format_of("{{ messages }} <|im_start|>") is None


@pytest.mark.parametrize("name", FORMATS)
@given(st.lists(st.sampled_from([
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "</parameter>",
    "[TOOL_CALLS]", "[ARGS]", '{"name": "f", "arguments": {', '{"name": "f"', "}", "{", "]", '"', "\\", ", ",
    "; ", "f", "\n", " ", "x", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>",
    "</think>", "<|python_tag|>",
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", "</｜DSML｜function_calls>",
    '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>", "<tool", "_call>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "function", "<｜tool▁sep｜>", "```json", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<minimax:tool_call>", '<invoke name="f">', '<parameter name="text">', "</invoke>",
    "</minimax:tool_call>", "]<]minimax[>[", "<item>", "</item>", "]<]minimax[>[<tool_call>", "<text>", "</text>",
    ']<]minimax[>[<invoke name="f">', "]<]minimax[>[</invoke>", "<seed:tool_call>", "</seed:tool_call>", "[CALL_ID]",
    "<|channel|>", "analysis",
    "commentary", "final", " to=functions.f", "<|constrain|>json", "<|message|>", "<|end|>", "<|call|>",
    "<|start|>assistant"],
    ), max_size=14).map("".join),
    st.lists(st.integers(1, 7), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_whatever_a_model_writes_is_read_alike_however_it_is_cut(name, text, sizes):
    items = read(name, text, sizes)
    assert items == read(name, text, [10**6])
    if FORMATS[name].channels:
        shown = "".join(i.text for i in items if isinstance(i, TextItem | Reasoning))
        assert not any(m in shown for m in FORMATS[name].special)
    elif not any(isinstance(i, CallBegun) for i in items) and not {"<think>", "</think>"} & {
            m for m in ("<think>", "</think>") if m in text}:
        assert "".join(i.text for i in items) == text


WHOLE = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"text": "a"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "f", "parameters": {"text": "a"}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"text": "a"}, "id": "abcdefghi"}]',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="text" '
                    'string="true">a</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>"
               '{"text": "a"}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
                   '{"text": "a"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"text": "a"}'
                    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">a</parameter>\n'
                  "</invoke>\n</minimax:tool_call>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<text>a]<]minimax[>[</text>'
                  "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=text>a</parameter>\n</function>\n"
                "</seed:tool_call>",
    "gpt_oss": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"text": "a"}',
    "gemma4": '<|tool_call>call:f{text:<|"|>a<|"|>}<tool_call|>',
    "glm": "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_off_is_as_much_as_there_was(name):
    whole = WHOLE[name]
    for end in range(len(whole)):
        items = read(name, whole[:end], [3])
        begun = [i for i in items if isinstance(i, CallBegun)]
        if not begun and not FORMATS[name].channels:        # where a header that is cut off is none
            assert "".join(i.text for i in items) == whole[:end]
        arguments = "".join(i.text for i in items if isinstance(i, Arguments))
        assert '{"text": "a"}'.startswith(arguments) and len(begun) <= 1
        assert not begun or not any(isinstance(i, TextItem) for i in items)
    assert called(read(name, whole, [1])) == [("f", {"text": "a"})]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_no_tool_is_the_text_that_it_came_as(name):
    whole = "a " + WHOLE[name] if name != "llama3_json" else WHOLE[name]
    shown = 'a\n\n{"text": "a"}' if name == "gpt_oss" else whole
    assert read(name, whole, [2], tools={"g": {}}) == [TextItem(shown)]


@pytest.mark.parametrize("name, text, calls", [
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "}\\""}}</tool_call>\n', [("f", {"a": '}"'})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}\n</tool_call>', [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})]),
    ("hermes", "<tool_call>[]</tool_call>", []), ("hermes", '<tool_call>{"name": 1}</tool_call>', []),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "a-b.c", "parameters": {}}',
     [("f", {}), ("a-b.c", {})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]a-b.c[ARGS]{}', [("f", {"a": 1}), ("a-b.c", {})]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", {"a": 1})]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', [("f", {"a": 1})]),
    ("kimi_k2", WHOLE["kimi_k2"].replace("functions.f:3", "f"), [("f", {"text": "a"})]),
    ("kimi_k2", WHOLE["kimi_k2"].replace("functions.f:3", " functions.a-b.c:12 "),
     [("a-b.c", {"text": "a"})]),
    ("kimi_k2", WHOLE["kimi_k2"].replace('{"text": "a"}', ""), [("f", {})]),
    ("deepseek_v3", WHOLE["deepseek_v31"], [("f", {"text": "a"})]),
    ("deepseek_v31", WHOLE["deepseek_v3"], [("f", {"text": "a"})]),
    ("deepseek_v31", WHOLE["deepseek_v3"].replace("```json\n", "").replace("\n```", ""),
     [("f", {"text": "a"})]),
    ("minimax_m2", WHOLE["minimax_m2"].replace("\n", ""), [("f", {"text": "a"})]),
    *(("minimax_m3", WHOLE["minimax_m3"].replace("]<]minimax[>[<text>a]<]minimax[>[</text>",
                                                 tags.replace("~", "]<]minimax[>[")), [("f", had)]) for tags, had in (
        ("\n~<count>1~</count>\n~<text>a < b</text>~</text>\n", {"count": 1, "text": "a < b</text>"}),
        ("~<more>~<a>~<b>2~</b>~</a>~<item>x~</item>~</more>", {"more": {"a": {"b": 2}, "item": "x"}}),
        ("~<more>~<item>1~</item>~</more>", {"more": {"item": 1}}), ("~<more>~</more>", {"more": {}}),
        ("~<items>~<item>a~</item>~<item>~<k>1~</k>~</item>~</items>", {"items": ["a", {"k": 1}]}),
        ("~<items>~</items>", {"items": []}), ("~<items>[1, 2]~</items>", {"items": [1, 2]}), ("", {}),
        ("~<what>~<item>1~</item>~</what>", {"what": [1]}), ("~<text>~</text>", {"text": ""}),
        # What is broken ends the call, with what was whole.
        ("~<count>1~</count>~<text>a~</count>", {"count": 1}),
        ("~<count>1~</count>x~<text>a~</text>", {"count": 1}),
        ("~</text>", {}), ("~<>a~</>", {}), ("~<text", {}),
        ("~<count>1~</count>~<more>x~<a>1~</a>~</more>", {"count": 1}),
        (70 * "~<a>" + 70 * "~</a>", {}))),
    ("minimax_m3", WHOLE["minimax_m3"].replace("\n", ""), [("f", {"text": "a"})]),
    ("minimax_m3", "]<]minimax[>[<tool_call>\n<invoke", []), ("minimax_m3", "]<]minimax[>[ <tool_call>", []),
    ("seed_oss", WHOLE["seed_oss"].replace(">a<", ">\na\n<"), [("f", {"text": "\na\n"})]),
    ("gemma4", '<|tool_call>call:f{count:1,really:true,nothing:null,items:[<|"|>a,b<|"|>,{k:[]}],more:{}}<tool_call|>',
     [("f", {"count": 1, "really": True, "nothing": None, "items": ["a,b", {"k": []}], "more": {}})]),
    ("gemma4", '<|tool_call>call:f{ "text" : "a}" }<tool_call|>\n<|tool_call>call:a-b.c{}<tool_call|>',
     [("f", {"text": "a}"}), ("a-b.c", {})]),
    ("gemma4", '<|tool_call>call:f{text:a word}<tool_call|>', [("f", {"text": "a word"})]),
    ("gemma4", '<|tool_call>call:f{more:{"x:y":1,"a\\"b":2}}<tool_call|>', [("f", {"more": {"x:y": 1, 'a"b': 2}})]),
    *(("gemma4", f"<|tool_call>call:f{{{broken}<tool_call|>", [("f", had)]) for broken, had in (
        ("items:[}", {}), ("items:[1}", {}), ("more:[{b:1]}", {}), ("more:{b:1]}", {}), ("items:[,]}", {}),
        ("text:}", {}), ("count:1,text:1", {"count": 1}), ('text:"a}', {}), ('text:"\\q"}', {}), ('text:<|"|>a}', {}),
        ("count:1,text", {"count": 1}), ("more:" + 70 * "{a:" + "1" + 71 * "}", {}))),
    ("gemma4", "<|tool_call>call:f", []), ("gemma4", "<|tool_call>f{}", []),
    ("glm", "<tool_call>f<arg_key>count</arg_key><arg_value>1</arg_value></tool_call>",
     [("f", {"count": 1})]),
    ("glm", "<tool_call>f\n</tool_call>\n<tool_call>f</tool_call>", [("f", {}), ("f", {})]),
    ("qwen3_coder", "<tool_call><function=f><parameter=really>True</parameter></function></tool_call>",
     [("f", {"really": True})]),
    ("qwen3_coder", "<tool_call><function=f><parameter=count>many</parameter></function></tool_call>",
     [("f", {"count": "many"})]),
])
def test_what_models_write_beside_the_form(name, text, calls):
    items = read(name, text, [4])
    assert called(items) == calls
    if not calls:
        assert items == [TextItem(text)]


@pytest.mark.parametrize("broken", ["items:[}", "items:[1}", "more:{b:1]}", 'text:"a}', 'text:"\\q"}', "text:1", "a",
                                    "a:{"])
def test_a_broken_call_is_the_same_however_it_comes(broken):
    text = f"<|tool_call>call:f{{count:1,{broken}<tool_call|> tail"
    found = [joined(read("gemma4", text, [size])) for size in (1, 2, 5, 1000)]
    assert called(found[0]) == [("f", {"count": 1})] and found[0][-1] == TextItem(" tail")
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("broken", ["<a>]<]minimax[>[</b>", "<>", "</a>", "x", "<a", 70 * "<a>]<]minimax[>["])
def test_a_broken_call_of_tags_is_the_same_however_it_comes(broken):
    text = WHOLE["minimax_m3"].replace("</invoke>", f"{broken}]<]minimax[>[</invoke>") + " tail"
    found = [joined(read("minimax_m3", text, [size])) for size in (1, 2, 5, 1000)]
    assert called(found[0]) == [("f", {"text": "a"})] and found[0][-1] == TextItem(" tail")
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("text, calls", [(text.replace("~", "]<]minimax[>["), calls) for text, calls in (
    # Ends that the model forgets: of a call, of a parameter, of an element; before the end of all, and before a call.
    ('~<invoke name="f">~<count>1~</count>~</tool_call>', [("f", {"count": 1})]),
    ('~<invoke name="f">~<count>1~</count>~<text>a~</tool_call>', [("f", {"count": 1})]),
    ('~<invoke name="f">~<count>1~</count>~<text>a~</invoke>~</tool_call>', [("f", {"count": 1})]),
    ('~<invoke name="f">~<count>1~</count>~<items>~<item>1~</invoke>~<invoke name="a-b.c">~<k>1~</k>~</invoke>'
     "~</tool_call>", [("f", {"count": 1}), ("a-b.c", {"k": 1})]),
    ('~<invoke name="f">~<count>1~</count>\n~<invoke name="a-b.c">~<k>1~</k>~</invoke>~</tool_call>',
     [("f", {"count": 1}), ("a-b.c", {"k": 1})]),
    ('~<invoke name="f">~<count>1~</count>~<text>a~<invoke name="a-b.c">~</invoke>~</tool_call>',
     [("f", {"count": 1}), ("a-b.c", {})]),
    ('~<invoke name="f">~<count>1~</count>x~<invoke name="a-b.c">~</invoke>~</tool_call>',
     [("f", {"count": 1}), ("a-b.c", {})]),
    ('~<invoke name="f">~</count>x~</tool_call>', [("f", {})]),
    # The same tag twice, and elements beside properties.
    ('~<invoke name="f">~<count>1~</count>~<count>2~</count>~</invoke>~</tool_call>', [("f", {"count": 1})]),
    ('~<invoke name="f">~<more>~<a>1~</a>~<a>2~</a>~</more>~</invoke>~</tool_call>', [("f", {"more": {"a": 1}})]),
    ('~<invoke name="f">~<what>~<item>1~</item>~<a>2~</a>~</what>~</invoke>~</tool_call>',
     [("f", {"what": {"item": 1, "a": 2}})]))])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_one_forgotten_end_loses_no_later_call_and_no_text(text, calls, size):
    behind = WHOLE["minimax_m3"] + " tail"
    opened = "]<]minimax[>[<tool_call>\n"
    items = read("minimax_m3", f"{opened}{text} and\n{behind}", [size])
    texts = [i for i in items if isinstance(i, TextItem)]
    assert called(items) == [*calls, ("f", {"text": "a"})] and texts == [TextItem(" and"), TextItem(" tail")]
    assert not any(i.text.count(f'"{key}":') > 1 for i in items if isinstance(i, Arguments) for key in ("count", "a"))


def test_an_id_that_the_model_wrote_is_the_calls_once():
    two = WHOLE["kimi_k2"].replace("<|tool_calls_section_end|>", "") + WHOLE["kimi_k2"].partition(
        "<|tool_calls_section_begin|>")[2]
    assert [i.id for i in read("kimi_k2", two, [3]) if isinstance(i, CallBegun)] == ["functions.f:3", ""]
    [begun] = (i for i in read("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", [3])
               if isinstance(i, CallBegun))
    assert begun.id == "abcdefghi"


def test_text_behind_calls_is_text():
    items = read("hermes", WHOLE["hermes"] + "\n" + WHOLE["hermes"] + "\nThat is all.\n", [5])
    assert items[-1] == TextItem("\nThat is all.\n") and len(called(items[:-1])) == 2


@pytest.mark.parametrize("marks", MARKS.values(), ids=MARKS)
@pytest.mark.parametrize("within", [False, True])
def test_reasoning_of_every_family_is_apart(marks, within):
    front = marks.open + marks.label
    assert marks.begins_within(f"a{front}\n") and marks.is_over(f"{front}b{marks.close}\n\n")
    text = f"{'' if within else front}\nHm.\n{marks.close}\n\nYes."
    for separate in (True, False):
        read_all = behind_reasoning(plain, within=within, separate=separate, marks=marks)
        for size in (1, 3, 100):
            reader = AnswerReader(read_all, {})
            found = [i for at in range(0, len(text), size) for i in reader.take(text[at:at + size])]
            kept = front if within and marks.kept else ""
            assert joined([*found, *reader.take("", True)]) == (
                [Reasoning("Hm."), TextItem("Yes.")] if separate else [TextItem(kept + text)])


def test_marks_are_found_by_the_template():
    assert marks_of(TEMPLATES["seed_oss"]) is MARKS["seed_oss"]
    assert marks_of(TEMPLATES["hermes"]) is THINK and marks_of(TEMPLATES["llama3_json"]) is None


def test_calls_may_end_reasoning_where_the_family_does_so():
    form = behind_reasoning(FORMATS["kimi_k2"].read, within=True, separate=True,
                            calls=FORMATS["kimi_k2"].opening)
    for size in (1, 1000):
        reader, text = AnswerReader(form, TOOLS), "Hm. " + WHOLE["kimi_k2"]
        found = [i for at in range(0, len(text), size) for i in reader.take(text[at:at + size])]
        found = joined([*found, *reader.take("", True)])
        assert found[0] == Reasoning("Hm.") and called(found) == [("f", {"text": "a"})]


@pytest.mark.parametrize("text, within, items", [
    ("<think>\na\n\n</think>\n\nb", False, [Reasoning("a"), TextItem("b")]),
    ("\n<think>a</think>b", False, [Reasoning("a"), TextItem("b")]),
    ("a</think>b", True, [Reasoning("a"), TextItem("b")]), ("a\n", True, [Reasoning("a\n")]),
    ("a</think>b", False, [TextItem("a</think>b")]), ("<think></think>b", False, [TextItem("b")]),
    ("<thi", False, [TextItem("<thi")]), ("a <think>b</think>", False, [TextItem("a <think>b</think>")]),
    ("\n a", False, [TextItem("\n a")]),
])
def test_reasoning_is_what_comes_first_between_its_marks(text, within, items):
    for sizes in ([1], [3], [100]):
        reader = AnswerReader(behind_reasoning(plain, within=within, separate=True), {})
        found = [i for at in range(0, len(text), sizes[0]) for i in reader.take(text[at:at + sizes[0]])]
        assert joined([*found, *reader.take("", True)]) == items
        whole = AnswerReader(behind_reasoning(plain, within=within, separate=False), {})
        assert joined([*whole.take(text), *whole.take("", True)]) == [TextItem(text)]
