"""`penstock dynamo MODEL`, also `penstock-dynamo MODEL`: one worker of NVIDIA Dynamo, from its flags to its exit code.

Owns its own flags and what a missing package means. What a worker does is `backend`'s.
"""
from __future__ import annotations

import argparse
import importlib.util

from penstock.config.base.dynamo import dynamo_default
from penstock.config.base.errors import ConfigError, install_hint
from penstock.config.settings.tree import Config

OWN = {
    "namespace": ("dynamo", "Dynamo namespace in which the frontend finds this worker", ()),
    "component": (None, "component name (default: backend, or prefill with --disaggregation-mode prefill)", ()),
    "endpoint": ("generate", "endpoint name", ()),
    "discovery-backend": ("etcd", "where workers are found", ("kubernetes", "etcd", "file", "mem")),
    "request-plane": ("tcp", "how requests come", ("tcp", "nats")),
    "event-plane": (None, "how KV events and load go out (default: Dynamo's)", ("zmq", "nats")),
    "dyn-tool-call-parser": (None, "name of Dynamo's parser of tool calls", ()),
    "dyn-reasoning-parser": (None, "name of Dynamo's parser of reasoning", ()),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Dynamo's own flags; $DYN_DISCOVERY_BACKEND and the like are defaults, as for its other workers."""
    group = parser.add_argument_group("Dynamo")
    for name, (default, text, choices) in OWN.items():
        shown = f" (default: {default})" if default else ""
        group.add_argument(f"--{name}", default=dynamo_default(name, default), choices=choices or None,
                           help=text + shown)


def run(config: Config | None, args: argparse.Namespace) -> int:
    """Serve until a signal or the engine's death; the exit code. Raises ConfigError."""
    assert config is not None, "the command line takes a MODEL"
    if config.nodes.rank:
        from penstock.exec.pipeline.agent import run_agent  # imports torch, which this process does not
        run_agent(config)
    if importlib.util.find_spec("dynamo") is None or importlib.util.find_spec("dynamo.common") is None:
        raise ConfigError(f"penstock-dynamo needs the package ai-dynamo: {install_hint('dynamo')}")
    from penstock.dynamo.backend import serve
    return serve(config, args)
