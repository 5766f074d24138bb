"""Templates: what published ones use works, what a hostile one tries is bounded."""
from __future__ import annotations

import datetime
import json
import os
import signal
from pathlib import Path

import pytest

from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.settings.tree import Config, ModelConfig
from penstock.model.weights.locate import locate
from penstock.text.chat import SOURCE_BYTES_MAX, ChatTemplate, plain_message, read_template
from penstock.text.model_text import open_text

RECALL = Path(__file__).parents[1] / "data" / "recall"
CHATML = ("{%- for m in messages %}\n<|{{ m['role'] }}|>{{ m['content'] | trim }}{{ eos_token }}\n"
          "{%- endfor %}\n{%- if add_generation_prompt %}<|assistant|>{% endif %}")
USER = [{"role": "user", "content": "ä 'quoted' <b>"}]


@pytest.fixture
def template():
    """Make templates that are closed whatever the test does."""
    made = []

    def make(source, *args, **kwargs):
        made.append(ChatTemplate(source, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_conversation_is_rendered_with_the_models_variables(template):
    chat = template(CHATML, {"eos_token": "</s>"})
    chat.check()
    messages = [{"role": "system", "content": "Be kind."}, *USER]
    assert chat.render(messages) == (
        "<|system|>Be kind.</s><|user|>ä 'quoted' <b></s><|assistant|>")
    assert chat.render(messages, add_generation_prompt=False).endswith("</s>")


def test_a_continued_message_ends_the_prompt_where_it_ends_also_with_spaces(template):
    chat = template(CHATML, {"eos_token": "</s>"})
    messages = [*USER, {"role": "assistant", "content": "It is "}]
    assert chat.render(messages, continue_final=True) == (
        "<|user|>ä 'quoted' <b></s><|assistant|>It is ")
    for wrong in ({"add_generation_prompt": True}, {}):
        with pytest.raises(RequestError) as e:
            chat.render(messages if wrong else USER, continue_final=True, **wrong)
        assert e.value.param == "continue_final_message"
    with pytest.raises(RequestError, match="cannot be continued"):
        template("no messages").render(messages, continue_final=True)


@pytest.mark.parametrize("source, shown", [
    ("{{ {'a': 'ä<'} | tojson }}", '{"a": "ä<"}'),
    ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
    ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
    ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
    ("{{ thinking }}{{ messages[0]['content'][0] }}", "onä"),
    ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
     "{{ ns.n }}", "1"),
])
def test_what_published_templates_use(template, source, shown):
    assert template(source).render(USER, variables={"thinking": "on"}) == shown


def test_strftime_now_is_today(template):
    year = datetime.datetime.now().year
    assert template("{{ strftime_now('%Y') }}").render(USER) in (str(year), str(year + 1))


def test_raise_exception_reaches_the_user(template):
    """Its own words whole, a message's in them never."""
    words = "roles must alternate: " + "user, assistant, " * 8
    chat = template(f"{{{{ raise_exception('{words}' if messages|length < 2 else messages[0].content) }}}}")
    with pytest.raises(RequestError, match=words) as e:
        chat.render(USER)
    assert e.value.param == "messages"
    with pytest.raises(RequestError) as e:
        chat.render([{"role": "user", "content": "x" * 1000}] * 2)
    assert "x" * 77 + "..." in str(e.value) and "x" * 81 not in str(e.value)


@pytest.mark.parametrize("source, error", [
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ messages[0].update({'a': 1}) }}", "unsafe"),
    ("{{ missing.attribute }}", "UndefinedError"),
    ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ("{{ 'a' * 10**10 }}", "Memory"),
    ("{{ '%9999999999d' % 1 }}", "Memory"),
    ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "over 8388608 characters"),
    ("{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
     "{% endfor %}", "Memory|memory"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ("{% include '/etc/passwd' %}", "TypeError|TemplateNotFound"),
])
def test_a_hostile_template_fails_its_request_and_nothing_else(template, source, error):
    chat = template("{% if messages[0].content == 'hi' %}fine{% else %}" + source + "{% endif %}")
    with pytest.raises(RequestError, match=error):
        chat.render(USER)
    assert chat.render([{"role": "user", "content": "hi"}]) == "fine"


def test_a_template_that_loops_is_killed_and_the_next_one_renders(template):
    chat = template("{% if messages[0].content == 'hi' %}fine{% else %}{% for a in range(99999) %}"
                    "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}",
                    render_s_max=0.3)
    with pytest.raises(RequestError, match=r"took over 0\.3 s"):
        chat.render(USER)
    chat._render_s_max = 60.0               # starting again takes a while on a busy machine
    assert chat.render([{"role": "user", "content": "hi"}]) == "fine"


def test_a_killed_renderer_costs_no_request(template):
    chat = template("x")
    for _ in range(2):
        chat.check()
        os.kill(chat._short._process.pid, signal.SIGKILL)
        assert chat.render(USER) == "x"


def test_close_leaves_no_process(template):
    chat = template("x")
    chat.check()
    process = chat._short._process
    chat.close()
    chat.close()
    assert process.poll() is not None


def test_wrong_templates_are_config_errors(template, tmp_path):
    with pytest.raises(ConfigError, match="the chat template is wrong: TemplateSyntaxError"):
        template("{% if %}").check()
    with pytest.raises(ConfigError, match="256 KiB"):
        template("x" * (SOURCE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="--chat-template"):
        read_template(str(tmp_path / "missing.jinja"))
    (tmp_path / "a.jinja").write_text("ä", encoding="utf-8")
    assert read_template(str(tmp_path / "a.jinja")) == "ä"


def test_messages_become_plain():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain_message({"role": "developer", "content": parts, "tool_calls": None}, 0) == {
        "role": "system", "content": "a\nb"}
    assert plain_message({"role": "user", "content": "x", "name": "eve"}, 0)["name"] == "eve"


FIELDS = pytest.mark.parametrize("field", ["name", "reasoning", "reasoning_content"])
LOOP = "{%% for m in messages %%}{{ m.content }}%s{%% endfor %%}"


@FIELDS
@pytest.mark.parametrize("form", ["{{ m.%s }}", "{{ m['%s'] }}", '{{ m.get("%s") }}'])
def test_a_field_that_the_template_shows_is_shown(template, form, field):
    text = template(LOOP % (form % field)).render([{**USER[0], field: "eve"}])
    assert text == USER[0]["content"] + "eve"


@FIELDS
@pytest.mark.parametrize("form", ["", "%s", "{{ tool.%s }}", "{{ tool_call.function.%s }}",
                                  "{{ %sspace }}"])
def test_a_field_that_the_template_does_not_show_is_dropped(template, form, field):
    made = template(LOOP % ("{% if false %}" + form.replace("%s", field) + "{% endif %}"))
    assert field not in made.shown
    assert made.render([{**USER[0], field: "eve"}]) == USER[0]["content"]


@pytest.mark.parametrize("message, param", [
    ({"role": "tool", "content": 1}, "messages[3].content"),
    ({"role": "function", "content": "x"}, "messages[3].role"),
    ({"content": "x"}, "messages[3].role"),
    ({"role": "user"}, "messages[3].content"),
    ({"role": "user", "content": 1}, "messages[3].content"),
    ({"role": "user", "content": []}, "messages[3].content"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
     "messages[3].content[0].type"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[3].content[0]"),
    ({"role": "user", "content": ["x"]}, "messages[3].content[0]"),
    ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[3].tool_calls[0]"),
    ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[3].tool_calls"),
    ({"role": "user", "content": "x", "name": 1}, "messages[3].name"),
    ("x", "messages[3]"),
])
def test_other_messages_are_refused_by_name(message, param):
    with pytest.raises(RequestError) as e:
        plain_message(message, 3)
    assert e.value.param == param


def test_request_variables_cannot_replace_the_servers(template):
    for name in ("messages", "raise_exception", "add_generation_prompt"):
        with pytest.raises(RequestError, match=f"may not set {name}"):
            template(CHATML).render(USER, variables={name: []})
    with pytest.raises(RequestError, match="messages is empty"):
        template(CHATML).render([])


def test_tools_and_documents_are_none_where_there_are_none(template):
    chat = template("{{ tools is none }} {{ documents is none }} {{ tools is not none }}")
    assert chat.render(USER) == "True True False"
    assert template("{{ tools | length }}").render(USER, tools=[{}]) == "1"
    with pytest.raises(RequestError, match="TypeError"):            # as in transformers
        template("{{ tools | length }}").render(USER)


def call_of(arguments: str) -> list[dict]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]


CALLS = "{%% for c in messages[1].tool_calls %%}%s{%% endfor %%}"


@pytest.mark.parametrize("form, whole, cut", [
    ("{{ 'a: ' + c.function.arguments }}", 'a: {"k": "é"}', 'a: {"k": "'),
    ("{{ c.function.arguments | tojson }}", '{"k": "é"}', json.dumps('{"k": "')),
    ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "k=é", 'arguments={"k": "'),
    ("{% for k, v in c.function.arguments|items %}{{ k }}={{ v }}{% endfor %}", "k=é", 'arguments={"k": "'),
    ("{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
     '{"k": "é"}', '{"k": "')], ids=["joined", "tojson", "walked", "items", "asked"])
def test_a_template_gets_arguments_in_the_form_that_it_shows(template, form, whole, cut):
    """An answer that ended by length has a call that is cut off; it stays in the history."""
    chat = template(CALLS % form)
    assert chat.render(call_of('{"k": "é"}')) == whole
    assert chat.render(call_of('{"k": "')) == cut
    assert '"k' not in chat.render(call_of("[1]")) and "[1]" in chat.render(call_of("[1]"))


def test_a_template_that_shows_no_form_of_arguments_says_its_first_error(template):
    with pytest.raises(RequestError, match="TypeError"):
        template(CALLS % "{{ 1 + c.function.arguments }}").render(call_of('{"k": 1}'))


TEMPLATES = sorted((RECALL.parent / "templates").glob("*.jinja"))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem)
def test_every_template_shows_a_tool_loop(template, path):
    chat = template(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
    function = {"name": "get_weather", "description": "Now.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "abcdefghi", "type": "function", "function": {
        "name": "get_weather", "arguments": '{"city": "Paris"}'}}
    said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"}]
    text = chat.render(said, tools=tools)
    for word in ("Weather?", "get_weather", "city", "Paris", "rain"):
        assert word in text
    assert "Paris" not in chat.render(said[:2], tools=tools)
    if path.stem not in ("command_r",):             # that one is only for requests with tools
        assert "get_weather" not in chat.render(said[:2])


def test_without_a_tokenizer_a_template_is_of_no_use(tmp_path):
    """A folder with a config.json only, as for random weights."""
    (tmp_path / "config.json").symlink_to(RECALL / "config.json")
    (tmp_path / "given.jinja").write_text("{{ messages[0].content }}|")
    files = locate(str(tmp_path), load_format="dummy")
    with pytest.raises(RequestError, match="no tokenizer"):
        open_text(Config(model=ModelConfig(model=str(tmp_path))), files).chat(USER)
    with pytest.raises(ConfigError, match=r"--chat-template .*given.jinja: .* has no tokenizer"):
        open_text(Config(model=ModelConfig(model=str(tmp_path),
                                           chat_template=str(tmp_path / "given.jinja"))), files)


def test_default_variables_of_a_template_give_way_to_a_request_s(tmp_path):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).symlink_to(RECALL / name)
    given = tmp_path / "given.jinja"
    given.write_text("{{ thinks }} {{ messages[0].content }}")

    def opened(template, **kwargs):
        config = Config(model=ModelConfig(model=str(tmp_path), chat_template=template,
                                          default_chat_template_kwargs=json.dumps(kwargs)))
        return open_text(config, locate(str(tmp_path)))
    text = opened(str(given), thinks=False)
    try:
        assert text.chat(USER).startswith("False ")
        assert text.template.render(USER, variables={"thinks": 7}).startswith("7 ")
    finally:
        text.close()
    with pytest.raises(ConfigError, match="messages is filled in for each request"):
        opened(str(given), messages=[])
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no chat template that reads them"):
        opened(None, thinks=True)


def test_an_image_part_is_refused_with_the_name_of_the_text_model(tmp_path):
    """Of a multimodal repository only the text is served."""
    (tmp_path / "vl").mkdir()
    (tmp_path / "vl/config.json").write_text(json.dumps({
        "model_type": "kimi_k25", "text_config": {
            **json.loads((RECALL / "config.json").read_text()), "model_type": "deepseek_v3"}}))
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / "vl" / name).symlink_to(RECALL / name)
    (tmp_path / "given.jinja").write_text("{{ messages[0].content }}")
    config = Config(model=ModelConfig(model="vl", chat_template=str(tmp_path / "given.jinja")))
    text = open_text(config, locate(str(tmp_path / "vl")))
    try:
        assert text.chat(USER) == USER[0]["content"]
        with pytest.raises(RequestError, match=r"'image_url': this server runs the text of vl: ") as e:
            text.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
        assert e.value.param == "messages[0].content[0].type"
    finally:
        text.close()


def test_a_program_in_place_of_a_template_is_refused_by_name(tmp_path):
    """A folder of a type that we have no template for; a template of the operator's works."""
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).symlink_to(RECALL / name)
    config = json.loads((RECALL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v99"}))
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding_dsv99.py").write_text("raise SystemExit\n")
    given = tmp_path / "given.jinja"
    given.write_text("{{ messages[0].content }}|")
    files = locate(str(tmp_path))
    with pytest.raises(RequestError, match=r"but a program, encoding/encoding_dsv99\.py, .*chat_template"):
        open_text(Config(model=ModelConfig(model=str(tmp_path))), files).chat(USER)
    text = open_text(Config(model=ModelConfig(model=str(tmp_path), chat_template=str(given))), files)
    try:
        assert text.chat(USER) == "ä 'quoted' <b>|"
    finally:
        text.close()


def test_the_process_of_a_template_gets_no_secret_of_ours(monkeypatch):
    monkeypatch.setenv("PENSTOCK_CLUSTER_KEY", "0123456789abcdef")
    chat = ChatTemplate("x")
    try:
        chat.check()
        given = Path(f"/proc/{chat._short._process.pid}/environ").read_text()
    finally:
        chat.close()
    assert "PYTHONPATH=" in given and "0123456789abcdef" not in given
