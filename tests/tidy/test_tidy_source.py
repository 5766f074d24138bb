"""Rules about single files: sizes, hash order in `core`, pickle, environment, tracked text."""
from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "penstock"
SOURCES = sorted(SRC.rglob("*.py"))
ALL_PYTHON = sorted(p for folder in ("src", "tests", "bench", "examples")
                    for p in (ROOT / folder).rglob("*.py"))
FILE_LINES_MAX = 500
FUNCTION_LINES = 70


def tracked() -> list[Path]:
    run = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT,
                         capture_output=True, text=True)
    if run.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in run.stdout.split("\0") if name and (ROOT / name).is_file()]


@cache
def parsed(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def nodes(paths: list[Path]) -> Iterator[tuple[Path, ast.AST]]:
    for path in paths:
        for node in parsed(path):
            yield path, node


def test_files_are_short() -> None:
    long = {str(p.relative_to(ROOT)): n for p in ALL_PYTHON
            if (n := len(p.read_text().splitlines())) > FILE_LINES_MAX}
    assert not long, long


def test_functions_are_short() -> None:
    long = [f"{p}:{n.lineno}: {n.name} has {n.end_lineno - n.lineno + 1} lines"
            for p, n in nodes(SOURCES)
            if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.end_lineno
            and n.end_lineno - n.lineno + 1 >= FUNCTION_LINES]
    assert not long, "\n".join(long)


def test_modules_say_what_they_own() -> None:
    silent = [str(p) for p in ALL_PYTHON if p.read_text().strip()
              and not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent, silent


# ---------------------------------------------------------------- hash order
SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}
ORDERED = {"sorted", "len", "sum", "min", "max", "any", "all", "set", "frozenset", "bool"}


def set_names(tree: ast.AST) -> set[str]:
    """Names and attributes that hold a set in this module, by annotation or by value."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            text = ast.unparse(node.annotation).strip("'\"")
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            if re.match(r"(set|frozenset|Set|AbstractSet)\b", text):
                found.add(name.removeprefix("self."))
        elif isinstance(node, ast.Assign) and is_set(node.value, set()):
            found |= {ast.unparse(t).removeprefix("self.") for t in node.targets}
    return found


def is_set(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name):
            return called.id in ("set", "frozenset")
        return isinstance(called, ast.Attribute) and called.attr in SET_METHODS
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub):
        return is_set(node.left, names) or is_set(node.right, names)
    return isinstance(node, ast.Name | ast.Attribute) and (
        ast.unparse(node).removeprefix("self.") in names)


def walks_a_set(tree: ast.AST) -> list[int]:
    """Lines that take elements of a set in its own order."""
    names, lines = set_names(tree), []
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and is_set(node.iter, names):
            lines.append(node.lineno)
        elif isinstance(node, ast.comprehension) and is_set(node.iter, names):
            holder = parents[node]
            outer = parents.get(holder)
            ordered = isinstance(holder, ast.SetComp) or (
                isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name)
                and outer.func.id in ORDERED)
            if not ordered:
                lines.append(node.iter.lineno)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name) and (
                node.func.id in ("list", "tuple", "iter", "enumerate", "zip", "map", "filter")):
            lines += [node.lineno for a in node.args if is_set(a, names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and (
                node.func.attr == "pop" and not node.args and is_set(node.func.value, names)):
            lines.append(node.lineno)
    return lines


def test_core_never_walks_a_set() -> None:
    """The order of a set of strings differs between processes: plans would not replay."""
    wrong = [f"{p}:{line}" for p in sorted((SRC / "core").rglob("*.py"))
             for line in walks_a_set(ast.parse(p.read_text()))]
    assert not wrong, wrong


@pytest.mark.parametrize(("code", "caught"), [
    ("for x in {1, 2}: pass", True),
    ("a = set()\nfor x in a: pass", True),
    ("def f(a: set[int]):\n    return [x for x in a]", True),
    ("def f(a: set[int]):\n    return sorted(x for x in a)", False),
    ("def f(a: set[int]):\n    return sorted(a)", False),
    ("class A:\n    a: set[int]\n    def f(self): return list(self.a)", True),
    ("def f(a: set[int], b):\n    return next(iter(a - b))", True),
    ("def f(a: set[int]):\n    return a.pop()", True),
    ("def f(a: dict[int, int]):\n    return [x for x in a]", False),
])
def test_the_set_rule_sees(code: str, caught: bool) -> None:
    assert bool(walks_a_set(ast.parse(code))) == caught


# ---------------------------------------------------------------- security
PICKLE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
PICKLING = {"recv_pyobj", "send_pyobj", "broadcast_object_list", "all_gather_object",
            "allow_pickle"}


def test_no_pickle_in_any_form() -> None:
    wrong = []
    for path, node in nodes(SOURCES):
        if isinstance(node, ast.Import):
            names = {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Attribute):
            names = {node.attr} if node.attr in PICKLING else set()
            if node.attr in ("load", "save") and ast.unparse(node.value) == "torch":
                names = {"pickle"}
        elif isinstance(node, ast.keyword):
            names = {node.arg} if node.arg in PICKLING else set()
        else:
            continue
        if names & (PICKLE | PICKLING | {"multiprocessing"}):
            wrong.append(f"{path}:{getattr(node, 'lineno', '?')}: {names}")
    assert not wrong, "\n".join(wrong)


def test_no_code_from_text() -> None:
    wrong = [f"{p}:{n.lineno}: {n.func.id}" for p, n in nodes(SOURCES) if isinstance(n, ast.Call)
             and isinstance(n.func, ast.Name) and n.func.id in ("eval", "exec", "compile")]
    assert not wrong, wrong


def test_only_config_reads_the_environment() -> None:
    """Settings are flags. Handing our environment on to a process that we start is no setting."""
    wrong = []
    for path, node in nodes(SOURCES):
        if path.is_relative_to(SRC / "config") or not isinstance(node, ast.Attribute):
            continue
        if ast.unparse(node) in ("os.environ", "os.getenv", "os.environb"):
            line = path.read_text().splitlines()[node.lineno - 1]
            if not any(ok in line for ok in ("**os.environ", ".copy()", '"PYTHONPATH"')):
                wrong.append(f"{path}:{node.lineno}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


# What people read may say what day it is; a deadline may not (`time.monotonic` does not leap).
DATED = {"api/openai_format.py", "engine/record.py", "engine/kv_events.py", "engine/traces/timeline.py", "api/app.py",
         "text/chat_render.py", "memory/stores/files.py", "memory/stores/valkey.py"}


def test_no_deadline_is_on_the_wall_clock() -> None:
    wrong = [f"{path}:{node.lineno}" for path, node in nodes(SOURCES)
             if isinstance(node, ast.Attribute) and node.attr in ("time", "now", "today", "utcnow", "time_ns")
             and ast.unparse(node.value).split(".")[-1] in ("time", "datetime", "date")
             and path.relative_to(SRC).as_posix() not in DATED]
    wrong += [f"{path}:{node.lineno}" for path, node in nodes(SOURCES) if isinstance(node, ast.ImportFrom)
              and node.module == "time" and {a.name for a in node.names} & {"time", "time_ns"}]
    assert not wrong, wrong


# ---------------------------------------------------------------- tracked text
# Written in parts, so that this file does not hold what it looks for.
FOLDERS = "|".join(("work", "root", "opt", "home/(?!someone|user)[a-z]+"))
MACHINE = re.compile(rf"(?<![\w./-])/(?:{FOLDERS})/\w")
HOSTS = re.compile("|".join(map(re.escape, ("pypi" + ".org", "pytorch" + ".org/whl", "hf" + ".co/",
                                            "files.python" + "hosted"))))
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".json", ".jsonl", ".sh", ""}


def test_tracked_text_names_no_machine_and_no_registry() -> None:
    wrong = []
    for path in tracked():
        if path.suffix not in TEXT or path.name == "LICENSE":
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE.search(line) or HOSTS.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


def test_no_stub_and_no_reminder() -> None:
    words = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
    wrong = [f"{p}:{i}" for p in ALL_PYTHON
             for i, line in enumerate(p.read_text().splitlines(), 1) if words.search(line)]
    wrong += [f"{p}:{n.lineno}" for p, n in nodes(SOURCES) if isinstance(n, ast.Raise)
              and n.exc is not None and "NotImplementedError" in ast.unparse(n.exc)]
    assert not wrong, wrong
