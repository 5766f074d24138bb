"""Direction of imports, by layer, from the syntax trees: lazy imports count as well."""
from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "penstock"
MODULES = {".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): p
           for p in sorted(PACKAGE.rglob("*.py"))}
LAYERS = {
    "config": (),
    "core": ("config",),
    "kernels": ("config",),
    "model": ("kernels", "config"),
    "memory": ("core", "kernels", "config"),
    "exec": ("core", "config", "model", "memory", "kernels", "transfer"),
    "transfer": ("core", "config", "memory"),
    "replay": ("core", "config"),
    "sim": ("core", "replay", "config"),
    "text": ("config", "model", "exec"),
    "engine": ("config", "core", "exec", "memory", "replay", "text", "transfer"),
    "llm": ("config", "engine", "model", "text"),
    "plan": ("bench", "config", "core", "engine", "exec", "model"),
    "api": ("config", "engine", "exec", "memory", "model", "text"),
    "dynamo": ("api", "cli", "config", "engine", "exec", "memory", "model", "text"),
}
# Layers that see only parts of another one.
ONLY = {
    ("kernels", "config"): ("penstock.config.base.errors",),
    ("memory", "core"): ("penstock.core.plan", "penstock.core.settings"),
    ("text", "exec"): ("penstock.exec.sampling.grammar",),
    ("exec", "core"): ("penstock.core.plan", "penstock.core.settings"),
    ("plan", "bench"): ("penstock.bench.report",),
    ("plan", "engine"): ("penstock.engine.client.affinity",),
    ("plan", "exec"): ("penstock.exec.load",),
    ("transfer", "core"): ("penstock.core.plan", "penstock.core.pair.messages"),
}
THIRD_PARTY = {
    "core": ("sortedcontainers",), "replay": (), "sim": (), "config": ("msgspec", "yaml"),
    "kernels": ("torch", "triton", "cuda", "numpy"),
}
FILES_BESIDE = 12
ENTRY_POINTS = ("penstock", "penstock.__main__", "penstock.cli.main", "penstock.engine.process")


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@cache
def imports(path: Path, module: str) -> list[tuple[str, int]]:
    """(imported module, line), relative imports made absolute; `from a import b` gives a.b when b
    is a module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(a.name, node.lineno) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                up = package.split(".")[:len(package.split(".")) - node.level + 1]
                base = ".".join([*up, *filter(None, [node.module])])
            for a in node.names:
                inner = f"{base}.{a.name}"
                found.append((inner if inner in MODULES else base, node.lineno))
    return found


def test_every_layer_imports_only_what_is_below_it() -> None:
    wrong = []
    for module, path in MODULES.items():
        layer = layer_of(module)
        for name, line in imports(path, module):
            other = layer_of(name)
            if not name.startswith("penstock") or layer not in LAYERS or other == layer:
                continue
            only = ONLY.get((layer, other))
            if other not in LAYERS[layer] or (only and not name.startswith(only)):
                wrong.append(f"{path}:{line}: {module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_simulator_sees_the_core_through_its_view() -> None:
    """So the core can change without its judge."""
    public = {f"penstock.core.{name}" for name in (
        "core", "lifecycle", "pair.messages", "pair.protocol", "plan", "settings")}
    calls = {"advance", "cfg", "check", "flushing", "stats", "watchers"}
    wrong = []
    for module, path in MODULES.items():
        if layer_of(module) == "sim" and module != "penstock.sim.world.view":
            wrong += [f"{path}:{line}: {name}" for name, line in imports(path, module)
                      if name.startswith("penstock.core") and name not in public]
            tree = ast.walk(ast.parse(path.read_text()))
            wrong += [f"{path}:{node.lineno}: core.{node.attr}" for node in tree
                      if isinstance(node, ast.Attribute) and node.attr not in calls
                      and "core" in (getattr(node.value, "attr", ""), getattr(node.value, "id", ""))]
    assert not wrong, "\n".join(wrong)


def test_pure_layers_use_no_library() -> None:
    wrong = []
    for module, path in MODULES.items():
        allowed = THIRD_PARTY.get(layer_of(module))
        for name, line in imports(path, module):
            top = name.split(".")[0]
            if allowed is None or top in sys.stdlib_module_names or top in (*allowed, "penstock"):
                continue
            wrong.append(f"{path}:{line}: {module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_files_need_each_other_in_one_direction() -> None:
    """In the whole house; imports for types count."""
    needs = {module: {name for name, _ in imports(path, module)}
             for module, path in MODULES.items() if path.name != "__init__.py"}
    while free := {module for module, others in needs.items() if not others & needs.keys()}:
        needs = {module: others for module, others in needs.items() if module not in free}
    assert not needs, f"these go round: {sorted(needs)}"


def test_calls_in_the_core_go_down_as_imports_do() -> None:
    """What is abstract is called below and written above. The two ends of a pair fill in what they have in
    common; who watches enters itself, and so does the seam to a peer."""
    wrong = [f"{path}:{node.lineno}" for module, path in MODULES.items()
             if layer_of(module) == "core" and module != "penstock.core.pair.protocol"
             for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Name) and node.id in ("ABC", "abstractmethod")]
    assert not wrong, wrong


def test_no_folder_is_a_heap() -> None:
    beside = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    heaps = {str(folder): n for folder, n in beside.items() if n > FILES_BESIDE}
    assert not heaps, heaps


def test_pins_are_counted_in_one_module() -> None:
    """A count that is kept by hand in many places is wrong in one of them."""
    wrong = [f"{path}:{node.lineno}" for module, path in MODULES.items()
             if layer_of(module) == "core" and module != "penstock.core.kv.page_table"
             for node in ast.walk(ast.parse(path.read_text()))
             if (getattr(node, "attr", "") == "pins" and not isinstance(getattr(node, "ctx", None), ast.Load))
             or (isinstance(node, ast.keyword) and node.arg == "pins")]
    assert not wrong, wrong


def test_page_columns_are_written_in_one_module() -> None:
    """To others they are sequences, so mypy sees who changes one under another name. Here: under its own."""
    def is_column(node: ast.AST) -> bool:
        return (isinstance(node, ast.Attribute) and node.attr in ("device", "host", "hot")
                and getattr(node.value, "id", "") != "self")

    def writes(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return (isinstance(node.func, ast.Attribute) and is_column(node.func.value)
                    and node.func.attr in ("append", "clear", "extend", "insert", "pop", "remove", "sort"))
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            return is_column(node) or (isinstance(node, ast.Subscript) and is_column(node.value))
        return False

    wrong = [f"{path}:{node.lineno}: {ast.unparse(node)}" for module, path in MODULES.items()
             if layer_of(module) == "core" and module != "penstock.core.kv.page_table"
             for node in ast.walk(ast.parse(path.read_text())) if writes(node)]
    assert not wrong, "\n".join(wrong)


# Fields of a request that several modules write, and why.
WRITTEN_BY_SEVERAL = {
    "computed": "a step is issued in `schedule` and ends in `retire`",
    "num_placeholders": "the same",
    "capacity": "pages come on the way in, and as a row grows",
    "step_depends_on": "`core` says for which loads, `schedule` which of them still fly",
    "blocked_on": "each phase that ends by itself says what for",
    "saving.is_done": "each phase in which a request is parked means its own pages",
    "storage.is_due": "it is queued in `state`, and taken from the queue in `core`",
}


def test_a_field_of_a_request_is_written_by_one_module() -> None:
    """And by `Request` itself: what several have to say to it is a method there. A field of a part of it, such as
    `hot`, is `hot.least`."""
    classes = {node.name: {part.target.id: ast.unparse(part.annotation) for part in node.body
                           if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)}
               for node in ast.parse(MODULES["penstock.core.request"].read_text()).body
               if isinstance(node, ast.ClassDef)}
    fields = set(classes["Request"])
    assert len(fields) <= 45
    fields |= {f"{part}.{name}" for part, kind in classes["Request"].items() for name in classes.get(kind, ())}
    writers: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        others = layer_of(module) == "core" and module != "penstock.core.request"
        for node in ast.walk(ast.parse(path.read_text())) if others else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                of, _, name = ast.unparse(node).partition(".")
                if of in ("r", "fork", "leader", "victim") and name in fields:
                    writers.setdefault(name, set()).add(module)
    assert len(writers) > 40
    assert {field for field, names in writers.items() if len(names) > 1} == WRITTEN_BY_SEVERAL.keys()


def test_core_has_no_clock_randomness_thread_or_io() -> None:
    banned = {"time", "datetime", "random", "secrets", "threading", "asyncio", "os", "io",
              "socket", "pathlib", "subprocess", "uuid", "select", "concurrent", "queue"}
    wrong = [f"{path}:{line}: {name}" for module, path in MODULES.items()
             if layer_of(module) == "core" for name, line in imports(path, module)
             if name.split(".")[0] in banned]
    assert not wrong, "\n".join(wrong)


def test_every_module_is_used() -> None:
    """A module that nothing imports is dead, unless it is an entry point or found by a registry."""
    used = set(ENTRY_POINTS)
    for module, path in MODULES.items():
        used |= {name for name, _ in imports(path, module) if name != module}
    # Commands, families and kernels are imported by name: a string in a table is a use.
    text = {m: p.read_text() for m, p in MODULES.items()}
    named = {m for m in MODULES if any(f'"{m}"' in t or f'"{m}:' in t for t in text.values())}
    used |= {f"{m}.reference" for m in MODULES if m.count(".") == 3 and m.startswith("penstock.kernels.")}
    dead = [m for m, p in MODULES.items()
            if m not in used and m not in named and p.name != "__init__.py"]
    assert not dead, dead


@pytest.mark.parametrize("argv", ["--help", "serve --help", "doctor --help", "--version"])
def test_help_imports_nothing_heavy(argv: str) -> None:
    """Speed of `penstock --help`, asserted by its cause: these take 0.1 to 2 s to import."""
    code = ("import sys\nfrom penstock.cli.main import main\n"
            f"try: main({argv.split()!r})\nexcept SystemExit: pass\n"
            "print('HEAVY', sorted({'torch', 'numpy', 'uvicorn', 'starlette', 'tokenizers',"
            " 'transformers', 'jinja2', 'asyncio'} & set(sys.modules)))")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1:] == ["HEAVY []"], run.stdout + run.stderr


def test_what_scripts_import_from_the_package_is_there() -> None:
    """No type checker reads bench and examples: a name that has moved would be found by who runs them."""
    gone = []
    root = PACKAGE.parents[1]
    for path in sorted([*(root / "bench").rglob("*.py"), *(root / "examples").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
            if module in MODULES:
                gone += [f"{path.name}: {module}.{a.name}" for a in node.names
                         if f"{module}.{a.name}" not in MODULES and a.name not in defined(MODULES[module])]
            elif (module or "").partition(".")[0] == "penstock":
                gone.append(f"{path.name}: {module}")
    assert not gone


@cache
def defined(path: Path) -> frozenset[str]:
    """Names that a module's own statements bind, those in its branches too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(a.asname or a.name for a in node.names)
    return frozenset(names)


def test_an_engine_checks_its_hello_before_it_imports_torch() -> None:
    """What torch may use of the CPU is set in between."""
    code = "import sys, penstock.engine.process; print('HEAVY', {'torch', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1:] == ["HEAVY set()"], run.stdout + run.stderr
