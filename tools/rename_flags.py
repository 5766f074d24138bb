"""Rename flags and settings to the field's names, in every file of the tree.

    python tools/rename_flags.py            rename, and print the files that changed

A branch that was begun before the names changed runs this once before it merges. The old spellings that
users may still type are in `src/penstock/config/base/old_flags.py`; that file, the changelog and `lab/` keep
them. Running the script twice changes nothing more.
"""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

# Field of the settings tree -> its new name, by section. The flag is the field with dashes.
FIELDS = {
    "kv": {
        "hbm_bytes": "kv_cache_memory_bytes", "memory_fraction": "gpu_memory_utilization",
        "sparse_kv": "host_decode", "sparse_unit": "sparse_block_size",
        "sparse_bounds_dtype": "sparse_metadata_dtype"},
    "schedule": {"step_tokens": "max_num_batched_tokens", "overlap": "async_scheduling"},
    "pair": {
        "prefill": "prefill_replicas", "decode": "decode_replicas",
        "pair_peer": "disaggregation_connect", "pair_listen": "disaggregation_listen",
        "pair_fallback": "disaggregation_fallback", "pair_timeout_s": "disaggregation_timeout_s",
        "pair_allow": "disaggregation_allow", "pair_room_s": "disaggregation_bootstrap_timeout_s"},
    "debug": {"check": "debug_check", "event_log": "debug_event_log"},
    "device": {"cpu_isa": "debug_cpu_isa"},
}
# Flags that became one for all processes: their fields went into a section of their own.
MERGED = {
    "pair-key-file": "cluster-key-file", "node-key-file": "cluster-key-file", "pair-tls": "cluster-tls",
    "pair-tls-cert": "cluster-tls-cert", "node-tls-cert": "cluster-tls-cert",
    "pair-plaintext": "cluster-insecure", "node-plaintext": "cluster-insecure",
    "pair-silence-s": "heartbeat-timeout-s", "node-silence-s": "heartbeat-timeout-s",
    "rank-silence-s": "heartbeat-timeout-s", "rank-timeout-s": "step-timeout-s"}
# Spelled so in text and in tests' keywords as well: no other thing has this name.
PLAIN = ("sparse_kv", "sparse_unit", "sparse_bounds_dtype", "memory_fraction", "pair_peer", "pair_listen",
         "pair_fallback", "pair_timeout_s", "pair_allow", "pair_room_s")
KEPT = ("CHANGELOG.md", "lab/", "tools/rename_flags.py", "src/penstock/config/base/old_flags.py",
        "src/penstock/config/settings/pairkey.py", "src/penstock/config/settings/reference.py",
        "src/penstock/config/request/params.py", "src/penstock/serve/http/types.py",
        "tests/unit/test_old_flags.py", "tests/tidy/test_tidy_words.py", "tests/tidy/words.toml",
        "docs/reference/migration.md", "tests/data/", "bench/results/")
ENDS = (".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".json", ".html", ".js", ".service", ".txt",
        "Makefile", "Dockerfile")


def rules() -> list[tuple[re.Pattern[str], str]]:
    """Pattern and replacement, in order."""
    found = []
    for section, fields in FIELDS.items():
        for old, new in fields.items():
            dashed = new.replace("_", "-")
            flag = old.replace("_", "-")
            # Not `--overlap-x`, nor a router's own `--prefill URL`.
            end = r"(?![\w-]| URL| http)"
            found.append((re.compile(rf"(?<![\w-])--(no-)?{flag}{end}"), rf"--\1{dashed}"))
            owner = r'(?<=\b[cw]\.)|(?<=\bconfig\.)|(?<=")' if old in ("prefill", "decode") else ""
            found.append((re.compile(rf"(?:{owner})\b{section}\.{old}\b(?!\()"), f"{section}.{new}"))
            found.append((re.compile(rf"(?<=\b{section}, ){old}="), f"{new}="))
            if old in PLAIN:
                found.append((re.compile(rf"(?<![\w-]){old}(?![\w-])"), new))
    found.append((re.compile(r"(?<![\w-])top_k_tokens(?![\w-])"), "sparse_top_k"))      # of a request
    found += [(re.compile(rf"(?<![\w-])--(no-)?{one}(?![\w-])"), rf"--\1{new}") for one, new in MERGED.items()]
    found.append((re.compile(r"\bPENSTOCK_(PAIR|NODE)_KEY\b"), "PENSTOCK_CLUSTER_KEY"))
    # Keywords with a size as people type it are of the library, not of the core.
    found.append((re.compile(r'\bhbm_bytes(=f?|": f?)"'), r'kv_cache_memory_bytes\1"'))
    found.append((re.compile(r'\bdram_bytes(=f?|": f?)"(?=\d+(?:\.\d+)?[KMGT])'), r'kv_offloading_size\1"'))
    found.append((re.compile(r"(?<![\w-])--dram-bytes([ =])(?=\d+(?:\.\d+)?[KMGT])"), r"--kv-offloading-size\1"))
    found.append((re.compile(r'"--dram-bytes", "(?=\d+(?:\.\d+)?[KMGT])'), r'"--kv-offloading-size", "'))
    found.append((re.compile(r"(?<![\w-])--dram-bytes(?= SIZE)"), r"--kv-offloading-size"))
    return found


WIDTH = 120


def wrapped(line: str) -> list[str]:
    """A line of Python that became too long, broken at a comma between arguments where there is one."""
    if len(line) <= WIDTH:
        return [line]
    quoted, cut, indent, columns = "", None, 0, list[int]()
    for i, char in enumerate(line):
        if quoted:
            quoted = "" if char == quoted and line[i - 1] != "\\" else quoted
        elif char in "\"'":
            quoted = char
        elif char in "([{":
            columns.append(i + 1)
        elif char in ")]}" and columns:
            columns.pop()
        elif char == "," and i < WIDTH and line[i + 1:i + 2] == " " and columns:
            cut, indent = i + 1, columns[-1]
    return [line] if cut is None else [line[:cut], *wrapped(" " * indent + line[cut:].lstrip())]


def main() -> None:
    root = Path(__file__).parents[1]
    listed = subprocess.run(["git", "ls-files"], cwd=root, text=True, capture_output=True, check=True).stdout
    for name in listed.split("\n"):
        if not name.endswith(ENDS) or name.startswith(KEPT):
            continue
        path = root / name
        text = path.read_text()
        new = text
        for pattern, replacement in rules():
            new = pattern.sub(replacement, new)
        if name.endswith(".py") and new != text:
            new = "\n".join(part for line in new.split("\n") for part in wrapped(line))
        if new != text:
            path.write_text(new)
            print(name)


if __name__ == "__main__":
    main()
