"""The dictionary: documents, help, messages and metrics use the field's words, in short sentences.

`tidy/words.toml` has the words, `tidy/words_ceilings.json` how many of each a file may still have. A ceiling
only falls: `python tests/words.py` (part of `make docs`) lowers it to what is there.
"""
from __future__ import annotations

import ast
import json
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = tomllib.loads((ROOT / "tests/tidy/words.toml").read_text())
CEILINGS = ROOT / "tests/tidy/words_ceilings.json"
SENTENCE_WORDS, LINE_CHARACTERS = 25, 120
LONG_SENTENCE, LONG_LINE = "sentences over 25 words", "lines over 120 characters"
HEADINGS = "headings that do not name their subject"
OPENINGS = "docstrings that begin with Of or As"
# Calls whose text users read.
SPEAKS = {"ConfigError", "Refusal", "RequestError", "ApiError", "ProtocolError", "Stranger", "Unusable", "_outside",
          "_value", "_switch", "refuse", "print", "log", "_log", "debug", "info", "warning", "error", "exception"}
# Of these packages comments, docstrings and names are read too; the others follow with their next redesign.
ROOMS = ("api", "bench", "cli", "config", "engine", "eval", "kernels", "llm", "memory", "model", "text", "transfer")
# Names of these stay where recorded traces and old metrics have them.
TIERS = tuple(pattern for pattern in WORDS["banned"] if re.match(r"\\b(hbm|dram)", pattern))
# Written by the code's own help and refusals, and decisions as they were made: their titles are checked.
GENERATED = {f"docs/{page}.md" for page in (
    "flags", "combinations", "models", "reference/flags", "reference/compatibility", "reference/models",
    "getting-started/clients", "reference/migration")}


@cache
def documents() -> dict[str, str]:
    """Each document that users read, by its path."""
    pages = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")]
    pages += sorted((ROOT / "docs").rglob("*.md"))
    return {page.relative_to(ROOT).as_posix(): page.read_text() for page in pages}


def prose(text: str) -> str:
    """The text without targets of links and without paths, which are names of the code."""
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"(?<![\w/])[\w.*-]+(?:/[\w.*:-]+)+", " ", text)


def found(text: str) -> Counter[str]:
    """How often a text has each banned and each counted word."""
    text = prose(text)
    return Counter({pattern: n for table in ("banned", "counted") for pattern in WORDS[table]
                    if (n := len(re.findall(pattern, text, re.IGNORECASE)))})


def long_ones(text: str) -> Counter[str]:
    """Sentences and lines of a Markdown text that are too long; tables and code are none."""
    text = re.sub(r"(?s)```.*?```|<!--.*?-->", "", text)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#", "!["))]
    spoken = re.sub(r"\]\([^)]*\)", "]", "\n".join(lines))
    parts = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |(?<=[.:;!?])[)`*\"]*\s+", spoken)
    return Counter({
        LONG_SENTENCE: sum(len(re.findall(r"[\w'`-]{2,}|\ba\b", part)) > SENTENCE_WORDS for part in parts),
        LONG_LINE: sum(len(re.sub(r"\]\([^)]*\)", "]", line)) > LINE_CHARACTERS for line in lines)})


def riddles(text: str) -> list[str]:
    """Headings of a Markdown text that do not name their subject."""
    headings = re.findall(r"^#+ .*", re.sub(r"(?s)```.*?```", "", text), re.MULTILINE)
    return [line for line in headings if any(re.search(pattern, line, re.IGNORECASE)
                                             for pattern in {**WORDS["headings"], **WORDS["banned"]})]


def texts(node: ast.AST) -> str:
    """The string constants below a node; of those without a space nothing can be told from a name."""
    return "\n".join(part.value for part in ast.walk(node)
                     if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value)


def spoken(tree: ast.Module) -> str:
    """What users read of a module: messages, help and HELP."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found += [texts(node)] if name in SPEAKS else []
            found += [texts(key.value) for key in node.keywords if key.arg in ("help", "description", "usage")]
        elif isinstance(node, ast.AnnAssign):
            held = node.annotation.value if isinstance(node.annotation, ast.Subscript) else None
            found += [texts(node.annotation)] if getattr(held, "id", "") == "Annotated" else []
            found += [texts(node.value)] if getattr(node.target, "id", "") == "HELP" and node.value else []
    return "\n".join(found)


def openings(tree: ast.Module) -> int:
    """Docstrings that begin with "Of " or "As `": they need the name above them to be a sentence."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return sum(bool(re.match("Of |As `", ast.get_docstring(node) or ""))
               for node in ast.walk(tree) if isinstance(node, kinds))


def of_source() -> dict[str, Counter[str]]:
    """The same of each module: banned words that users read or that its package is free of, and openings of
    docstrings."""
    found: dict[str, Counter[str]] = {}
    for path in sorted((ROOT / "src/penstock").rglob("*.py")):
        whole, name = path.read_text(), path.relative_to(ROOT).as_posix()
        tree, is_clean = ast.parse(whole), name.split("/")[2] in ROOMS
        text = spoken(tree)
        found[name] = Counter({OPENINGS: openings(tree)}) + Counter({
            pattern: len(re.findall(pattern, whole if is_clean and pattern not in TIERS else text, re.IGNORECASE))
            for pattern in WORDS["banned"]})
    return found


@cache
def measured() -> dict[str, Counter[str]]:
    """What each document and each module has of words that are banned or counted, and of long sentences."""
    bodies = {name: text for name, text in documents().items()
              if name not in GENERATED and not name.startswith("docs/design/adr/0")}
    changes = found((ROOT / "CHANGELOG.md").read_text())
    bodies_of = {"CHANGELOG.md": Counter({pattern: changes[pattern] for pattern in WORDS["banned"]})}
    return bodies_of | {name: found(text) + long_ones(text) + Counter({HEADINGS: len(riddles(text))})
            for name, text in bodies.items()} | of_source()


def over(name: str, counts: Counter[str], ceilings: dict[str, dict[str, int]]) -> list[str]:
    """What is more than a file may have, with what to write instead."""
    instead = {**WORDS["banned"], **WORDS["counted"]}
    return [f"{name}: {n} of {pattern!r}, {ceilings.get(name, {}).get(pattern, 0)} allowed: "
            f"{instead.get(pattern, 'cut it')}"
            for pattern, n in counts.items() if n > ceilings.get(name, {}).get(pattern, 0)]


def lower() -> None:
    """Write the ceilings: no more than there is, and no more than was allowed."""
    before = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else None
    after: dict[str, dict[str, int]] = {}
    for name, counts in measured().items():
        allowed = counts if before is None else before.get(name, {})
        least = {pattern: min(n, allowed.get(pattern, 0)) for pattern, n in sorted(counts.items())}
        after[name] = {pattern: n for pattern, n in least.items() if n}
    kept = {name: least for name, least in sorted(after.items()) if least}
    CEILINGS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    lower()
