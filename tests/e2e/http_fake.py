"""`penstock serve` with everything real but the model: an engine process that echoes its prompt.

    python http_fake.py MODEL FLAGS...       the server; MODEL is only a name
    python http_fake.py --engine FD          its engine: 20,000 tokens of context, a step takes
                                             PENSTOCK_FAKE_STEP_S (2 ms)
"""
from __future__ import annotations

import functools
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

UNIT = Path(__file__).parents[1] / "unit"
STEP_S = float(os.environ.get("PENSTOCK_FAKE_STEP_S", "0.002"))


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, UNIT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine(descriptor: str) -> None:
    fake = load("engine_fake")

    class Slow(fake.FakeExecutor):
        def poll(self, *, block):
            if self.plans:
                time.sleep(STEP_S)
            return super().poll(block=block)

    fake.FakeExecutor = Slow
    fake.CONTEXT = 20_000
    fake.VOCAB = load("tokenizers_fake").byte_level().get_vocab_size()
    if "PENSTOCK_FAKE_CALM" in os.environ:     # no prompt is a fault: "." would begin with 13
        fake.CRASH = fake.ENDLESS = fake.REFUSED = fake.FAULT = -1
    sys.argv = ["engine", descriptor]
    fake.main()


def server(words: list[str]) -> int:
    from penstock.api import server as http_main
    from penstock.cli import main
    from penstock.engine.client import supervised as kept
    from penstock.text import model_text as text
    from penstock.text.tokenizer import Tokenizer

    fake = load("tokenizers_fake")
    raw = fake.byte_level()
    def tokenizer_of(files, override):
        template = "{% if %}" if files.name == "broken-template" else fake.CHATML
        return None if files.name == "ids" else Tokenizer(
            raw, eos_ids=(raw.token_to_id(fake.EOS),), chat_template=template, template_vars={})

    argv = [sys.executable, "-P", __file__, "--engine"]
    kept.EngineClient = functools.partial(kept.EngineClient, argv=argv)
    http_main.DEAD_S = 5.0                     # a test asks twice meanwhile
    http_main.pull = lambda config, say: None
    http_main.files_of = lambda model: SimpleNamespace(
        name=model.model, eos_ids=(), folder=Path(model.model), generation_config={}, wrapper=None, config={})
    text.open_tokenizer = tokenizer_of
    code = main.main(["serve", *words])
    assert "torch" not in sys.modules or "preloaded" in sys.modules, "the API process has imported torch"
    return code


if __name__ == "__main__":
    if sys.argv[1] == "--engine":
        engine(sys.argv[2])
    else:
        sys.exit(server(sys.argv[1:]))
