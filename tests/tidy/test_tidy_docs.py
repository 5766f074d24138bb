"""Documents that name files, commands and flags name existing ones."""
from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import times
from flags_reference import reference
from metrics_reference import reference as metrics_page

from penstock.cli.main import COMMANDS
from penstock.config.settings.cli import Parser, add_flags, flags, prepare

ROOT = Path(__file__).parents[2]
DOCS = [p for p in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md",
                    ROOT / "SECURITY.md", ROOT / "CHANGELOG.md",
                    *sorted((ROOT / "docs").rglob("*.md"))) if p.exists()]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PATH = re.compile(r"`((?:src|tests|docs|bench|lab|examples|\.ci)/[\w./*-]+|[\w-]+\.(?:md|toml|txt))`"
                  r"|\]\((?!https?:|#)([^)#\s]+)")
COMMAND = re.compile(r"^\s*(?:\$ )?((?:make|penstock) [^#\n]*)", re.MULTILINE)
BLOCK = re.compile(r"^```(?:sh|bash|console|shell)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("doc", DOCS, ids=ids)
def test_paths_exist(doc: Path) -> None:
    named = [a or b for a, b in PATH.findall(doc.read_text())]
    missing = [n for n in named if "NNNN" not in n
               and not any(base.glob(n) and list(base.glob(n)) for base in (ROOT, doc.parent))]
    assert not missing, missing


def headings(doc: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"(?s)```.*?```|\]\([^)]*\)", "", doc.read_text())
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("doc", DOCS, ids=ids)
def test_anchors_of_links_exist(doc: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", doc.read_text())
    assert not [(file, anchor) for file, anchor in links if anchor not in headings(doc.parent / file if file else doc)]


@pytest.mark.parametrize("doc", DOCS, ids=ids)
def test_rows_have_the_columns_of_their_table(doc: Path) -> None:
    wrong, columns = [], 0
    for line in doc.read_text().splitlines():
        cells = len(re.sub(r"`[^`]*`|\\\\\|", "", line).strip().split("|")) if line.startswith("|") else 0
        wrong += [line] if columns and cells not in (0, columns) else []
        columns = cells and (columns or cells)
    assert not wrong, wrong


def test_only_decisions_and_figures_link_to_the_lab() -> None:
    """Experiments are not kept true, so documents that are do not lean on them."""
    links = {ids(doc) for doc in DOCS if re.search(r"\]\([^)]*\blab/", doc.read_text())}
    assert links and all(name == "docs/performance.md" or "/adr/" in name for name in links)


def test_tests_that_are_named_exist() -> None:
    named = {name for doc in DOCS for name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", doc.read_text())}
    assert not [(path, test) for path, test in named if f"def {test}(" not in (ROOT / path).read_text()]


def test_times_are_summed_by_folder() -> None:
    noted = {"tests/unit/a.py::test_a": 2.4, "tests/e2e/b.py::test_b": 3.0, "tests/unit/c.py::test_c": 1.0}
    assert times.by_folder(noted) == [("unit", 3.4), ("e2e", 3.0)]


def commands(doc: Path) -> list[list[str]]:
    """Commands of shell blocks, and inline ones in backquotes."""
    text = doc.read_text()
    found = [c for block in BLOCK.findall(text)
             for c in COMMAND.findall(block.replace("\\\n", " "))]
    found += re.findall(r"`((?:make|penstock) [^`\n]+)`", text)
    return [shlex.split(c.replace("...", "").rstrip("& ")) for c in found]


@pytest.mark.parametrize("doc", DOCS, ids=ids)
def test_commands_exist(doc: Path) -> None:
    for words in commands(doc):
        if words[0] == "make":
            wanted = [w for w in words[1:] if "=" not in w and not w.startswith("-")]
            assert set(wanted) <= TARGETS, words
        elif not words[1].startswith("-") and words[1].islower():
            assert words[1] in COMMANDS, words


@pytest.mark.parametrize("doc", DOCS, ids=ids)
def test_serve_commands_parse(doc: Path) -> None:
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    parser.add_argument("--print-config", action="store_true")
    for words in commands(doc):
        if words[:2] == ["penstock", "serve"] and len(words) > 2:
            parser.parse(prepare(words[2:]))


def test_every_page_has_its_place() -> None:
    """A decision is docs/design/adr/NNNN-title.md, headed `# NNNN: Title`; pages lie in four folders."""
    at_top = {"README.md", "performance.md"}
    rooms = {"getting-started", "guides", "reference", "design"}
    stray = [ids(doc) for doc in DOCS if doc.is_relative_to(ROOT / "docs")
             and doc.relative_to(ROOT / "docs").parts[0] not in at_top | rooms]
    assert not stray, stray
    listed = (ROOT / "docs/design/adr/README.md").read_text()
    for page in (ROOT / "docs/design/adr").glob("0*.md"):
        assert page.read_text().startswith(f"# {page.name[:4]}: "), page
        assert f"]({page.name})" in listed, f"{page}: list it in the table of docs/design/adr/README.md"


def test_decisions_that_are_missing_are_named() -> None:
    pages = [int(path.name[:4]) for path in (ROOT / "docs/design/adr").glob("0*.md")]
    have = set(pages)
    assert len(have) == len(pages), "two decisions have one number"
    said = re.search(r"no page ([\d, or]+)\.", (ROOT / "docs/design/adr/README.md").read_text())
    dropped, missing = {int(n) for n in re.findall(r"\d+", said[1])} if said else set(), set(range(1, max(have))) - have
    assert dropped <= missing and {n for n in missing if n < max(have) - 9} <= dropped, "the last ones may be drafts"


def test_flags_are_documented() -> None:
    """docs/reference/flags.md is what the config tree says; `make docs` writes it."""
    text = (ROOT / "docs/reference/flags.md").read_text()
    assert text == reference(), "make docs"
    for flag in flags():
        assert flag.dest == "model.model" or flag.spellings[0] in text


def test_metrics_page_is_generated() -> None:
    assert (ROOT / "docs/reference/metrics.md").read_text() == metrics_page() + "\n", "make docs"


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony
    for target in phony[1].split():
        assert re.search(rf"^{target}:.*##", text, re.MULTILINE), target
    assert set(phony[1].split()) == TARGETS
