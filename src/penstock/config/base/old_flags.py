"""Old spellings of flags. They work for one release more and stand in no help text.

`docs/reference/migration.md` is written from these tables.
"""
from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.config.base.errors import ConfigError
from penstock.config.base.sizes import parse_bytes, show_bytes

# Same values, another name.
RENAMED = {
    "--hbm-bytes": "--kv-cache-memory-bytes",
    "--memory-fraction": "--gpu-memory-utilization",
    "--sparse-kv": "--host-decode",
    "--sparse-unit": "--sparse-block-size",
    "--sparse-bounds-dtype": "--sparse-metadata-dtype",
    "--step-tokens": "--max-num-batched-tokens",
    "--overlap": "--async-scheduling",
    "--prefill": "--prefill-replicas",
    "--decode": "--decode-replicas",
    "--pair-peer": "--disaggregation-connect",
    "--pair-listen": "--disaggregation-listen",
    "--pair-fallback": "--disaggregation-fallback",
    "--pair-timeout-s": "--disaggregation-timeout-s",
    "--pair-allow": "--disaggregation-allow",
    "--pair-room-s": "--disaggregation-timeout-s",
    "--disaggregation-bootstrap-timeout-s": "--disaggregation-timeout-s",
    "--index-dtype": "--sparse-metadata-dtype",
    "--pair-key-file": "--cluster-key-file",
    "--node-key-file": "--cluster-key-file",
    "--pair-tls": "--cluster-tls",
    "--pair-tls-cert": "--cluster-tls-cert",
    "--node-tls-cert": "--cluster-tls-cert",
    "--pair-plaintext": "--cluster-insecure",
    "--node-plaintext": "--cluster-insecure",
    "--pair-silence-s": "--heartbeat-timeout-s",
    "--node-silence-s": "--heartbeat-timeout-s",
    "--rank-silence-s": "--heartbeat-timeout-s",
    "--rank-timeout-s": "--step-timeout-s",
    "--check": "--debug-check",
    "--event-log": "--debug-event-log",
    "--cpu-isa": "--debug-cpu-isa",
}

# Switches that became a value of another flag.
SWITCHED = {
    "--expert-parallel": "--ep=0", "--no-expert-parallel": "--ep=1",
    "--kv-storage-readonly": "--kv-storage-write-policy=none",
    "--no-kv-storage-readonly": "--kv-storage-write-policy=write_through",
}

SIZE = "--kv-offloading-size"
OFF = ("--no-host-tier", "--no-enable-hierarchical-cache")
SWITCHES = ("--host-tier", "--enable-hierarchical-cache", *OFF)
# Flags that became forms of SIZE, ours and SGLang's: bytes or a size, GB, and multiples of the GPU's KV cache.
FORMS = ("--dram-bytes", "--hicache-size", "--dram-ratio", "--hicache-ratio")


def renamed(name: str) -> str:
    """Return the new spelling of a flag, `--no-` kept; any other name as it is."""
    if name.startswith("--no-") and (new := RENAMED.get("--" + name[5:])):
        return "--no-" + new[2:]
    return RENAMED.get(name, name)


def offloading(given: Mapping[str, str], sized: bool) -> list[str]:
    """Return SIZE for the flags that became forms of it: a size is worth more than a switch.

    given   name -> value of those that were typed, "" of switches      sized   SIZE itself is there
    Raises ConfigError: sizes that do not agree, or a size of what is off.
    """
    found = {name: _form(name, given[name]) for name in FORMS if name in given}
    off = [name for name in OFF if name in given]
    if len(found) + sized > 1 or (off and (found or sized)):
        names = [*found, *off, *([SIZE] if sized else [])]
        raise ConfigError(f"{', '.join(names)}: give the size of KV in host memory once, with {SIZE}")
    if found or off:
        return [f"{SIZE}={next(iter(found.values()), '0')}"]
    return [f"{SIZE}=auto"] if given.keys() & set(SWITCHES) and not sized else []


def _form(name: str, value: str) -> str:
    if name == "--dram-bytes":
        try:
            return f"{parse_bytes(value)}B"
        except ConfigError as e:
            raise ConfigError(f"{name}: {e}") from None
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", value):
        raise ConfigError(f"{name} {value}: {'a number of GB' if name == '--hicache-size' else 'a number'} is needed "
                          f"(or {SIZE} SIZE)")
    return f"{value}GB" if name == "--hicache-size" else f"{value}x"


def size_of(text: str) -> str:
    """Return a value of SIZE in one form: auto, a multiple such as 2x, or a size; a plain number is GiB.

    Raises ConfigError.
    """
    if text == "auto":
        return text
    if text.endswith("x"):
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text[:-1]):
            raise ConfigError(f"{text!r}: a number and x is needed, such as 2x")
        return f"{float(text[:-1]):g}x"
    size = show_bytes(parse_bytes(f"{text}GiB" if re.fullmatch(r"[0-9.]+", text) else text))
    return size if not size.isdigit() or size == "0" else f"{size}B"
