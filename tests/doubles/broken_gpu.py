"""Ends a process in which a test has broken a GPU's context: each later test of it would fail.

A process of pytest-xdist is replaced, and the test is reported as the one that crashed it, after its own report. A run
in one process ends. Nothing ends where tests stay in groups: xdist 3.8 runs such a test again, or waits forever.
"""
from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

TEARDOWN_S = 60             # of fixtures of this process, some of which end servers


def broken() -> str:
    """What CUDA says since an access that is not legal, however often it is asked; "" if nothing is wrong."""
    return _says() and _says()


def _says() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):          # the others may have no context here
                torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of each process of xdist, in the one that starts them."""
    node.workerinput["replaced"] = node.config.getoption("dist") in ("load", "worksteal")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    done = yield
    given = getattr(item.config, "workerinput", None)
    if (given is None or given["replaced"]) and (why := broken()):
        said = f"{item.nodeid} has broken the GPU's context, so its process ends: {why}"
        if given is None:
            pytest.exit(said, returncode=1)
        print(said, file=sys.__stderr__, flush=True)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
        signal.alarm(TEARDOWN_S)
        with contextlib.suppress(BaseException):
            item.session._setupstate.teardown_exact(None)
        os._exit(1)
    return done
