"""/openapi.json against the server that serves it: every route, every error, bodies made from the schema."""
from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from http_server import Server

from penstock.api.app import Health, build_app
from penstock.api.completions import OpenAI
from penstock.api.limits import Keys
from penstock.api.openapi import document
from penstock.config.settings.tree import ServerConfig
from penstock.engine.client.metrics import Metrics
from penstock.text.model_text import ModelText

# Not expressed by the document, hence not checked here: the events of a stream, and aborts, which are
# connections that end. A value out of its range is a 400, which the document lists.
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
          "response_schema_conformance")


def test_the_document_has_every_route_with_its_methods():
    api = OpenAI(None, ModelText(None, None, ()), Metrics(), model="m", choices_max=1)
    app = build_app(api, Health(), Keys([]), ServerConfig(), {}, [])
    served = {(route.path.replace(":path", ""), method.lower()) for route in app._app.routes
              for method in route.methods - {"HEAD"}}
    assert served == {(path, method) for path, item in document()["paths"].items() for method in item}


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_FAKE_CALM", "1")
    made = Server(tmp_path)
    for prompt in "./01":
        assert made.post(prompt=prompt).status_code == 200
    yield made
    assert made.end(signal.SIGTERM) == 0
    assert "internal error" not in made.log.read_text()


@pytest.mark.sweep
def test_answers_to_requests_made_from_the_document_are_as_it_says(server):
    run = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{server.http.base_url}/openapi.json", "--seed=1",
         "--max-examples=60", "--checks=" + ",".join(CHECKS), "--phases=coverage,fuzzing", "--no-color",
         "--exclude-path=/live"],
        capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    # All but the path of the document itself, and an answer that does not end.
    assert f"Tested: {len(document()['paths']) - 2}\n" in run.stdout, run.stdout
