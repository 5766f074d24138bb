"""For every test: one thread, no hub, unpickling is refused, a hang ends with all threads' stacks."""
from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import cells
import pytest
import times
import unchanged
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Before torch is imported, and for every process that a test starts. Two threads on cores that
# others use as well are 5 to 20 times slower than one.
for _name, _value in (("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false"),
                      ("HF_HUB_OFFLINE", "1")):
    os.environ.setdefault(_name, _value)

_HOOKS = Path(__file__).parent / "hooks"
_spec = importlib.util.spec_from_file_location("no_pickle", _HOOKS / "sitecustomize.py")
assert _spec and _spec.loader
no_pickle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(no_pickle)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path.append(str(_HOOKS))
import preloaded  # noqa: E402

preloaded.install()

# A shell that starts the tests in the background has them ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)

_BEGAN = pytest.StashKey[float]()
# A hang, not slowness: at least 20 times what any test takes on a quiet machine.
HANG_S = 600
LONG_HANG_S = 2400


# The same cases in each run, however slow the machine is: what is new is looked for by `make soak`. And
# whatever else is collected: Hypothesis draws constants out of all local modules that are imported then.
assert callable(providers._get_local_constants), "this Hypothesis finds them otherwise: leave them out there"
providers._get_local_constants = providers.Constants
settings.register_profile("anew", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("anew"), derandomize=True, database=None)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def _collector_as_it_was() -> Iterator[None]:
    before, collects = gc.get_threshold(), gc.isenabled()
    yield
    gc.set_threshold(*before)
    if collects:
        gc.enable()


@pytest.fixture(autouse=True)
def _started_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """Servers and engines of a test marked `by_exec` are started as users start them."""
    preloaded.on = (request.config.getoption("--device") == "cpu" and not request.config.getoption("--by-exec")
                    and request.node.get_closest_marker("by_exec") is None)
    yield


@pytest.fixture(autouse=True)
def _nothing_unpickled() -> Iterator[None]:
    no_pickle.FOUND.clear()
    yield
    assert not no_pickle.FOUND, f"unpickled: {no_pickle.FOUND}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where executors run")
    parser.addoption("--by-exec", action="store_true", help="start all servers and engines as users start them")
    parser.addoption("--cells", type=Path, help="write which combinations passed here: tools/cells.py")
    parser.addoption("--commit", help="of what is tested; git is asked else")
    parser.addoption("--times", type=Path, help="note the seconds of each test here, and print folders")


SECONDS: Counter[str] = Counter()           # processor time of each test with all its cases, fixtures included
PASSED: dict[str, str] = {}                 # combinations that a test covers: the test
FAILED: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    properties = dict(report.user_properties)
    SECONDS[report.nodeid.split("[")[0]] += properties.get("processor", 0.0) if report.when == "teardown" else 0.0
    if report.when == "call" and not report.skipped:
        (PASSED if report.passed else FAILED).update(dict.fromkeys(properties.get("cells", ()), report.nodeid))
    elif report.failed:         # to end, or its process has crashed
        FAILED.update({cell: test for cell, test in PASSED.items() if test == report.nodeid})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if (path := config.getoption("--cells")) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_run_of_cells(config), indent=0) + "\n")
    if (path := config.getoption("--times")) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(SECONDS, indent=0))
        for folder, took in times.by_folder(SECONDS):
            terminalreporter.write_line(f"{took:7.0f} s  tests/{folder}")


def _run_of_cells(config: pytest.Config) -> dict[str, object]:
    if config.getoption("--device") == "cuda":
        import torch
        device = torch.cuda.get_device_name()
    else:
        from penstock.config.base.machine import probe
        device = probe().cpu
    commit = config.getoption("--commit") or subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=8"], cwd=config.rootpath, capture_output=True, text=True,
        check=False).stdout.strip() or "unknown"
    passed = {cell: test.split("[")[0] for cell, test in PASSED.items() if cell not in FAILED}
    return {"commit": commit, "date": f"{datetime.date.today()}", "device": device, "cells": passed,
            "failed": sorted(FAILED)}


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cuda":
        _own_gpu_first(int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]))
        import broken_gpu
        import where
        where.DEVICE = "cuda"
        config.pluginmanager.register(broken_gpu)


def _own_gpu_first(worker: int) -> None:
    """Workers share the GPUs out: each takes them in another order, so that `cuda:0` is not one for all."""
    import torch
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    names = gpus.split(",")
    turn = worker % len(names)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[turn:] + names[:turn])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several processes share the tests out, but not those of a file that makes a server or a model. What is
    about drafts is found by `-k speculation`."""
    device = "gpu" if items and items[0].config.getoption("--device") == "cuda" else "cpu"
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        marks = [mark.kwargs for mark in item.iter_markers("covers")]
        if found := cells.of_marks(marks, params, device):
            item.user_properties.append(("cells", [
                *map(" ".join, found), *cells.families_of(marks, device)]))
        for mark in item.iter_markers("when_changed"):
            if unchanged.same(item.path, mark.args):
                item.add_marker(pytest.mark.sweep)
        if {"draft", "drafts", "mtp", "eagle3"} & set(item.path.stem.split("_")):
            item.extra_keyword_matches.add("speculation")
        if item.path.parent.name in ("e2e", "equal", "parity"):
            kind = f"-{params['kind']}" if item.path.parent.name == "equal" and "kind" in params else ""
            item.add_marker(pytest.mark.xdist_group(item.path.stem + kind))


def _processor_s() -> float:
    """Seconds that this process has used, and its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEGAN] = _processor_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        item.user_properties.append(("processor", _processor_s() - item.stash[_BEGAN]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    long = item.get_closest_marker("sweep") or item.get_closest_marker("soak")
    limit_s = LONG_HANG_S if long else HANG_S

    def hang(signum: int, frame: object) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        pytest.fail(f"hangs: not finished after {limit_s} s", pytrace=False)

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(limit_s)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
