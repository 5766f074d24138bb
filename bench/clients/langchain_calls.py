"""Nine calls of langchain-openai."""
from __future__ import annotations

from calls import FRANCE, KEY, MODEL, PERSON, TOOL, V1, call, main
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = FRANCE[0]["content"]


def chat(**more) -> ChatOpenAI:
    return ChatOpenAI(**{"model": MODEL, "base_url": V1, "api_key": KEY, "temperature": 0, "max_tokens": 60,
                         **more})


@call
def invoke():
    assert "Paris" in chat().invoke(QUESTION).content


@call
def stream():
    assert "Paris" in "".join(str(c.content) for c in chat().stream(QUESTION))


@call
def batch():
    assert all("Paris" in m.content for m in chat().batch([QUESTION] * 3))


@call
def completion():
    llm = OpenAI(model=MODEL, base_url=V1, api_key=KEY, temperature=0, max_tokens=8)
    assert "Paris" in llm.invoke("The capital of France is")


def structured(method: str) -> None:
    schema = {"title": "Person", "description": "A person.", **PERSON}
    got = chat(max_tokens=200).with_structured_output(schema, method=method).invoke(QUESTION)
    assert set(got) == {"name", "age"}


@call
def structured_output():
    structured("json_schema")


@call
def structured_output_by_a_call():
    structured("function_calling")


@call
def tools_and_their_results():
    bound = chat().bind_tools([TOOL], tool_choice="required")
    said = bound.invoke(QUESTION)
    [made, *_] = said.tool_calls
    assert made["name"] == "get_weather"
    results = [ToolMessage("rain", tool_call_id=c["id"]) for c in said.tool_calls]
    assert chat().bind_tools([TOOL]).invoke([("user", QUESTION), said, *results]) is not None


@call
def responses_api():
    assert "Paris" in chat(use_responses_api=True).invoke(QUESTION).text


@call
def overflow_of_a_prompt():
    long = "hello " * 9000   # 9000 tokens; the demo's context is 8192
    for model in (chat(), chat(use_responses_api=True)):
        for send in (model.invoke, lambda text, model=model: list(model.stream(text))):
            try:
                send(long)
            except ContextOverflowError:
                continue
            raise AssertionError("no error")


main()
