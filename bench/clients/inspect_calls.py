"""inspect-ai: a task that generates, and one whose model must call a tool."""
from __future__ import annotations

import tempfile

from calls import KEY, MODEL, V1, call, main
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def get_weather():
    async def execute(city: str) -> str:
        """The weather of a city now.

        Args:
            city: Its name.
        """
        return "rain"
    return execute


def run(*solver, target: str):
    model = get_model("openai/" + MODEL, base_url=V1, api_key=KEY,
                      config=GenerateConfig(temperature=0, max_tokens=80))
    task = Task(dataset=[Sample(input="What is the capital of France?", target=target)], solver=[*solver],
                scorer=includes())
    [log] = eval(task, model=model, display="none", log_dir=tempfile.mkdtemp(), message_limit=8,
                 temperature=0, max_tokens=80)
    assert log.status == "success", log.error
    return log


@call
def plain_task():
    assert run(generate(), target="Paris").results.scores[0].metrics["accuracy"].value == 1


@call
def task_with_a_tool():
    log = run(use_tools(get_weather(), tool_choice="any"), generate(tool_calls="single"), target="rain")
    roles = [m.role for m in log.samples[0].messages]
    assert "tool" in roles, roles


main()
