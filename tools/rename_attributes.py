"""Rename methods, fields and functions to the field's words, in every Python file of the tree.

    python tools/rename_attributes.py            rename, and print the files that changed

A name that means several things is renamed only at the sites that a row of `RENAMED` describes. A branch that was
begun before the names changed runs this once before it merges. Running it twice changes nothing more.
"""
from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

CORE = r"src/penstock/(core|sim)/.*|tests/.*|bench/(planning|worst)\.py"
KV = r"src/penstock/core/kv/.*"
ALLOCATE = r"src/penstock/core/kv/allocate\.py"
PAGES = r"src/penstock/core/kv/pages\.py"
POOL = r"src/penstock/core/kv/pool\.py"
TREE = (r"src/penstock/core/kv/(prefix_tree|promote|page_table|moves|pages)\.py|tests/property/test_core_tree\.py|"
        r"tests/conformance/test_executor_states\.py")
REQUEST = r"src/penstock/core/request\.py"
POLICY = r"src/penstock/core/policy/.*"
MUTANTS = r"tests/sim/mutants/.*"
LISTING = r"src/penstock/core/kv/(listing|pages|allocate)\.py"
SPOKEN = (r"src/penstock/(exec|model|kernels|config|core)/.*|"
          r"tests/unit/test_(meeting|parts|front|sampling_draw|transfer_layout)\.py")
PIPELINE = r"src/penstock/exec/pipeline/.*"
PARALLEL = (r"src/penstock/(exec|model)/.*|src/penstock/config/settings/tree\.py|"
            r"tests/(unit|doubles|parity|conformance)/.*|bench/.*|tests/e2e/test_(lanes|pipeline_death|nodes)\.py")
ANY = r".*"
# Old name, new name, sites, files. A site is `def`, `class`, `field` (a line `name: type`), `kw` (an argument by name),
# `name`, or the token before the dot and the dot. In text between backticks a name is renamed wherever its file is.
RENAMED: tuple[tuple[str, str, str, str], ...] = (
    # What may be evicted.
    ("soften", "make_evictable", ANY, CORE),
    ("keep", "pin_resident", r"def", PAGES), ("keep", "pin_resident", r"kv\.|_kv\.", KV),
    ("keep", "pin_resident", r"self\.", ALLOCATE),
    ("lend", "mark_evictable", ANY, KV), ("fix", "unmark_evictable", ANY, TREE + "|" + POOL),
    ("loosen", "mark_evictable", ANY, KV), ("loose", "num_evictable", ANY, POOL),
    ("loose", "evictable_in", r"src\.", KV),
    ("loose", "evictable_in", r"copy\.|field", TREE + "|" + CORE),
    ("loose", "num_evictable", r"(?!copy).*\.|def", CORE), ("loose_slabs", "evictable_slabs", ANY, CORE),
    ("loose", "evictable", r"name", r"src/penstock/core/check\.py"),
    # What a request gets, and what is set aside for it.
    ("Way", "GroupAllocation", ANY, ALLOCATE + "|" + MUTANTS), ("_way", "_allocate_group", ANY, ALLOCATE),
    ("way", "part", r"name|field|kw|way\.", ALLOCATE), ("ways", "parts", ANY, ALLOCATE),
    ("borrow", "pin_optional", r"def|claim\.", KV), ("has_borrowed", "has_optional", ANY, KV),
    ("spare", "optional", r"self\.|claim\.", r"src/penstock/core/kv/(claims|allocate)\.py"),
    ("spare", "optional", r"e\.|entry\.|field", PAGES + r"|src/penstock/core/check\.py"),
    ("borrows", "shares_pages", ANY, CORE),
    ("later", "reserved_pages", r"r\.", CORE), ("later", "reserved_pages", r"self\.|field", REQUEST),
    ("later", "reserved_pages", r"w\.|way\.|part\.|field", ALLOCATE),
    ("promise", "reserve_pages", r"def|.*\.", KV), ("promises", "num_reserved", ANY, CORE),
    ("promised", "reserved", r"arena\.|arenas\.|\]\.|self\.", CORE),
    ("promised", "reserved_will_come", r"def|name|reclaim\.", r"src/penstock/core/policy/reclaim\.py"),
    ("promised", "reserved_will_come", r"reclaim\.", POLICY + "|" + MUTANTS),
    # What a request waits for.
    ("excused", "forced_preemptions", r".*\.|field", CORE),
    ("awaits", "blocked_on", ANY, CORE),
    ("waits", "step_depends_on", r"r\.", CORE), ("waits", "step_depends_on", r"field", REQUEST),
    ("coming", "next_missing", r"r\.|self\.|field", REQUEST + r"|src/penstock/core/kv/prefetch\.py"),
    ("more", "has_more", r"r\.|field", REQUEST + r"|src/penstock/core/(core|queues|kv/prefetch)\.py"),
    ("asked", "lookup_keys", r"w\.", r"src/penstock/sim/judge\.py"),
    ("asked", "lookup_keys", r"r\.", CORE.replace("tests/", "tests/sim/")),
    ("asked", "lookup_keys", r"self\.|field", REQUEST), ("asked_from", "lookup_from", ANY, CORE),
    # What goes.
    ("leave", "free_gradually", r"kv\.", CORE), ("leave", "free_gradually", r"self\.|def", PAGES),
    ("leaving", "freeing", r"kv\.", CORE), ("leaving", "freeing", r"self\.", PAGES),
    ("leaving", "pages_will_come", r"def|name|reclaim\.", r"src/penstock/core/policy/(reclaim|queue)\.py"),
    ("_has_left", "_has_freed", ANY, PAGES),
    ("spare", "evict_redundant", r"def|kv\.", PAGES + r"|src/penstock/core/policy/residency\.py"),
    ("unmap_some", "evict_read_pages", ANY, CORE), ("take_back", "reclaim", r"def|.*\.", CORE),
    ("shrink", "trim_hot_buffers", r"kv\.", CORE), ("shrink", "trim_hot_buffers", r"self\.|def", PAGES),
    # Why it did not get it.
    ("behind", "waits_for_fence", r"field|kw|refused\.", PAGES + r"|src/penstock/(core/policy/reclaim|sim/view)\.py"),
    ("seen", "capacity_version", r"shortage\.|field", PAGES + r"|src/penstock/core/policy/queue\.py"),
    ("coming", "capacity_version", r"def|self\.|kv\.", PAGES + r"|src/penstock/core/policy/queue\.py"),
    ("Early", "SourceNotReady", ANY, CORE), ("_early", "_not_ready", ANY, ALLOCATE),
    ("Found", "PrefixMatch", ANY, CORE),
    ("by", "lost_by_group", r"name", r"src/penstock/core/kv/listing\.py"),
    ("by", "lost_by_group", r"found\.|entry\.|field", LISTING),
    ("cut", "lost_by_group", r"r\.", CORE), ("cut", "lost_by_group", r"field", REQUEST),
    ("cut", "lost", r"found\.|field", LISTING),
    # Tensor parallelism.
    ("lanes", "collectives", r"pipeline\.", r".*"), ("near", "p2p_allreduce", r"pipeline\.", r".*"),
    ("far", "remote_node", r"pipeline\.", r".*"), ("local", "local_launcher", r"pipeline\.", r".*"),
    ("lanes", "tp_group", r"kw", r"tests/unit/test_parts\.py"), ("lanes", "tp_size", r"kw", r"tests/.*"),
    ("lanes", "tp_ranks", r"name", r"tests/unit/test_parts\.py"),
    ("_lane", "_tp_rank", ANY, PIPELINE), ("add", "all_reduce", r"_ranks\.", PIPELINE),
    ("add", "all_reduce", r"self\.", r"src/penstock/exec/pipeline/p2p_allreduce\.py"),
    ("Lanes", "TpGroup", ANY, PARALLEL), ("Lane", "TpRank", ANY, PARALLEL), ("lane", "tp_rank", ANY, PARALLEL),
    ("GlooLanes", "GlooGroup", ANY, PARALLEL), ("NcclLanes", "NcclGroup", ANY, PARALLEL),
    ("_Joins", "_AllGather", ANY, PIPELINE), ("Near", "P2PAllReduce", ANY, PARALLEL),
    ("add", "all_reduce", r"def", PIPELINE + r"|src/penstock/model/base\.py"),
    ("join", "all_gather", r"def", PIPELINE + r"|src/penstock/model/base\.py"),
    ("lanes", "collectives", r"name|lanes\.", r"tests/unit/test_meeting\.py"),
    ("far", "remote_node", r"name|far\.", r"tests/unit/test_nodes\.py"),
    ("LANES", "TP_RANKS", ANY, PARALLEL), ("LANE_SHARE", "TP_SHARE", ANY, PARALLEL),
    ("lanes", "sharers", ANY, r"src/penstock/model/parts\.py"),
    ("lanes", "size", ANY, r"src/penstock/exec/pipeline/(near|p2p_allreduce)\.py"),
    ("lanes", "tp_ranks", ANY, r"src/penstock/exec/step/links\.py"),
    ("lanes", "tp_group", ANY, r"src/penstock/model/.*|src/penstock/exec/(load/weights|pipeline/process)\.py"),
    ("_lanes", "_tp_group", ANY, r"src/penstock/model/.*"),
    ("lanes", "tp_size", ANY, PARALLEL), ("_lanes", "_tp_size", ANY, PARALLEL),
    ("add", "all_reduce", r"(_?lanes|_?tp_group|_?near)\.", PARALLEL),
    ("join", "all_gather", r"_?(lanes|tp_group)\.", PARALLEL),
    ("Meeting", "Rendezvous", ANY, PARALLEL), ("_meeting", "_rendezvous", ANY, PARALLEL),
    ("meeting", "rendezvous", ANY, PARALLEL),
    # Names in strings.
    ("lend", "mark_evictable", r"promote\.", MUTANTS), ("_way", "_allocate_group", r"allocate\.", MUTANTS),
    ("keep", "pin_resident", r"kv\.", MUTANTS), ("fix", "unmark_evictable", r"page_table\.|moves\.", MUTANTS),
    ("_early", "_not_ready", r"allocate\.", MUTANTS),
)
# Words of comments, docstrings and messages.
PROSE: tuple[tuple[str, str, str], ...] = (
    (r"\bLane\.(?=evenly)", "TpRank.", SPOKEN),
    (r"\blanes\.(?=Meeting)", "collectives.", SPOKEN), (r"\blanes(?= {4})", "tp_group", SPOKEN),
    (r"\blane(?= {4})", "tp_rank", SPOKEN), (r"\blanes:", "tp_size:", r"src/penstock/exec/front\.py"),
    (r"\blane, lanes:", "tp_rank, tp_group:", SPOKEN),
    (r"\b[Ll]anes\b(?!\.\w)", "TP ranks", SPOKEN), (r"\b[Ll]ane\b(?!\.\w)", "TP rank", SPOKEN),
)
# Also names of arguments, which keep theirs.
ARGUMENTS = {"keep", "promised"}


def site_of(tokens: list[tokenize.TokenInfo], i: int) -> str:
    back = i - 1
    while back > 0 and tokens[back].type in (tokenize.NL, tokenize.COMMENT):
        back -= 1
    before, after = (tokens[back].string if i else ""), tokens[i + 1].string
    if before == ".":
        return f"{tokens[i - 2].string}."
    if before in ("def", "class"):
        return before
    if after == ":" and tokens[i].line[:tokens[i].start[1]].isspace() and tokens[i].line.startswith("    "):
        return "field"
    return "kw" if after == "=" and before in ("(", ",") else "name"


def edits(path: str, text: str) -> Iterator[tuple[int, int, int, str]]:
    """Yield (line, first column, end column, new text) of each token that changes."""
    rows = [(old, new, re.compile(sites)) for old, new, sites, files in RENAMED if re.fullmatch(files, path)]
    names = {old for old, _, _ in rows}
    prose = [(re.compile(old), new) for old, new, files in PROSE if re.fullmatch(files, path)]

    def renaming(name: str, sites: tuple[str, ...]) -> str | None:
        return next((new for old, new, at in rows if old == name
                     and any(at.fullmatch(site) for site in sites)), None)

    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    seen: set[tuple[int, int]] = set()
    for i, token in enumerate(tokens):
        line, column = token.start
        if token.type == tokenize.NAME and token.string in names:
            site = site_of(tokens, i)
            if new := renaming(token.string, (site,)):
                yield line, column, token.end[1], new
        elif (token.string[1:-1] in names and token.string[0] == '"'
              and [tokens[i - 3].string, tokens[i - 1].string] == ["(", ","]):
            site = {"KVCache": "kv"}.get(tokens[i - 2].string, tokens[i - 2].string) + "."     # setattr(x, "name", ...)
            if new := renaming(token.string[1:-1], (site,)):
                yield line, column + 1, token.end[1] - 1, new
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            is_format = re.match(r"[rb]?f", token.string) is not None
            for row, part in enumerate(token.string.split("\n")):
                start = column if row == 0 else 0
                code = [found.span() for found in re.finditer(r"\{[^{}]*\}", part)] if is_format else []
                code += [found.span() for found in re.finditer(r"`[^`]*`", part)]
                for begin, end in code:
                    for found in re.finditer(r"((?:\w+\.)?)(\w+)", part[begin:end]):
                        if part[begin] == "`" and (found[2] in ARGUMENTS or found[0] != part[begin + 1:end - 1]):
                            continue
                        bare = ("def", "class", "field", "self.") if part[begin] == "`" else ("name",)
                        sites = (found[1],) if found[1].islower() else bare
                        if new := renaming(found[2], sites):
                            at = start + begin + found.start(2)
                            yield line + row, at, at + len(found[2]), new
                for pattern, new in prose:
                    for found in pattern.finditer(part):
                        inside = is_format and any(a <= found.start() < b and part[a] == "{" for a, b in code)
                        if not inside and (line + row, start + found.start()) not in seen:
                            seen.add((line + row, start + found.start()))
                            yield line + row, start + found.start(), start + found.end(), new


def renamed(path: str, text: str) -> str:
    lines = text.split("\n")
    before = lines.copy()
    for line, start, end, new in sorted(set(edits(path, text)), reverse=True):
        row = lines[line - 1]
        lines[line - 1] = row[:start] + new + row[end:]
    for i, (was, row) in enumerate(zip(before, lines, strict=True)):
        if (found := re.search(r"\S( {3,})# ", row)) and (at := was.find("# ")) > 0 and row.find("# ") > at:
            cut = min(row.find("# ") - at, len(found[1]) - 2)          # a comment stays in its column
            lines[i] = row[:found.start(1)] + row[found.start(1) + cut:]
    return "\n".join(lines)


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout
    for path in listed.split():
        if path.startswith(("tools/rename_", "lab/")):
            continue
        text = Path(path).read_text()
        if (new := renamed(path, text)) != text:
            Path(path).write_text(new)
            print(path)


if __name__ == "__main__":
    main()
