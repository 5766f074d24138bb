"""Writes docs/reference/flags.md, every flag and the names of what is refused, and docs/reference/migration.md.

    python tools/flags_reference.py [migration]

It prints the page; a test compares it with the file.
"""
from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator

from penstock.config.base import old_flags as old
from penstock.config.base.sizes import show_bytes
from penstock.config.settings.cli import SECTIONS, Flag, flags
from penstock.config.settings.refuse import REFUSED
from penstock.config.settings.refuse_model import OF_MODEL
from penstock.config.settings.tree import SERVE_ONLY
from penstock.config.settings.unbuilt import ALWAYS, UNBUILT

_INTRO = """\
# Flags

Written by `make docs` from `src/penstock/config/`; a test compares it. A flag is also a keyword
argument of `LLM(...)`, without its dashes and with `_` for `-`. Flags marked (serve) are refused by
`LLM`, `penstock chat`, `generate` and `bench`, which have no use for them. SIZE is a number of bytes, or a
number with K, M, G, T (powers of 1,024; also KiB, MiB, ...) or KB, MB, GB, TB (powers of 1,000).
`penstock serve MODEL --print-config` prints the resolved values.

`--config FILE` takes flags from a YAML file. A key is a flag without its dashes (`max-model-len: 8192`, or
`max_model_len: 8192`); `model` is MODEL. True and false turn a switch on and off, a list is joined by
commas, an object becomes JSON, and null is as if the key were not there. The command line wins.

`penstock serve` also takes flags from the environment: `PENSTOCK_ARG_` and the flag in capitals, with `_` for `-`
(`PENSTOCK_ARG_MAX_MODEL_LEN=8192`; `PENSTOCK_ARG_MODEL` is MODEL; 1 and 0 turn a switch on and off). An empty variable
is as if it were not there. The command line wins over the environment, and that over the file."""


def reference() -> str:
    """The whole document, ending in a newline."""
    return "\n".join([_INTRO, *_flags(), *_refused()]) + "\n"


def _head(title: str, columns: str) -> Iterator[str]:
    """Yield a part's title and the head of its table."""
    yield f"\n## {title}\n"
    yield f"| {columns} |"
    yield "|---" * len(columns.split("|")) + "|"


def _flags() -> Iterator[str]:
    section = ""
    for flag in flags():
        if flag.dest == "model.model":
            continue
        if flag.section != section:
            section = flag.section
            title = SECTIONS[section]
            yield from _head(title[0].upper() + title[1:], "flag | also | default | meaning")
        also = ", ".join(f"`{s}`" for s in flag.spellings[1:])
        if flag.kind == "host":
            also = "`--enable-hierarchical-cache`, `--hicache-size` (GB), `--hicache-ratio`"
        if flag.name in _ALSO:
            also += f"{', ' if also else ''}{_ALSO[flag.name]}"
        if flag.inverse:
            also += f"{'; ' if also else ''}off: " + ", ".join(f"`{s}`" for s in flag.inverse)
        yield f"| {_form(flag)} | {also} | {_default(flag)} | {flag.help}" + (
            " (serve) |" if flag.dest in SERVE_ONLY else " |")


# Spellings that are rewritten before flags are parsed.
_ALSO = {"ep": "`--enable-expert-parallel`, `--enable-ep-moe` (0)", "hf_overrides": "`--rope-scaling` (one field)",
         "generation_config": "`--sampling-defaults openai` (none)"}


def _form(flag: Flag) -> str:
    own = flag.spellings[0]
    if flag.kind == "bool":
        return f"`{own}`, `--no-{own[2:]}`"
    values = {"int": "N", "float": "X", "bytes": "SIZE", "list": "A,B", "host": "SIZE"}.get(flag.kind, "TEXT")
    return f"`{own} {','.join(flag.listed) or values}`"


def _default(flag: Flag) -> str:
    if flag.kind == "bool":
        return "on" if flag.default else "off"
    if flag.default in (None, ()):
        return ""
    return f"`{show_bytes(flag.default) if flag.kind == 'bytes' else flag.default}`"


def flags_of(fields: tuple[str, ...]) -> str:
    """The flags of a refusal's fields."""
    return ", ".join(f"`--{f.split('.')[1].replace('_', '-')}`" for f in fields)


def _refused() -> Iterator[str]:
    taken = {name for flag in flags() for name in flag.spellings}        # some of their values are refused
    names = dict.fromkeys(name for entry in UNBUILT for name in entry.flags if name not in taken)
    yield f"""
## Refused values and combinations

A value out of range, or flags that do not work together, end the start with exit code 2 before anything is loaded.
Every reason is printed, with what to do. There are {len(REFUSED)} such rules for flags alone, and {len(OF_MODEL)} for
flags with the model that was found. [Combinations](compatibility.md) shows what works together.

## Flags of other engines

Those in the column *also* work. These are accepted, because they ask for what is always so:
"""
    yield _names(ALWAYS)
    yield """
These are refused by name, because their feature is not built or needs no flag here. The error says which, and what
to do instead. Values that ask for what happens anyway are accepted (`--schedule-policy fcfs`).
"""
    yield _names(names)


def _names(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in sorted(names)) + ".", 118, break_on_hyphens=False)


_MIGRATION = """\
# Old spellings

Written by `make docs`; a test compares it. These spellings work for one release more, as flags, as keyword
arguments of `LLM(...)` and as keys of a `--config` file, and stand in no other document. Those with *none* are
refused with what to do.

| old flag | new flag |
|---|---|"""
_OTHERS = """
A plain number of `--kv-offloading-size` is GiB, as in vLLM; one of `--dram-bytes` is bytes.

| old | new |
|---|---|
| body field `top_k_tokens`, `SamplingParams(top_k_tokens=...)` | `sparse_top_k` |
| `sparse_unit` of `GET /server_info` | `sparse_block_size` |
| `step_tokens`, `overlap` of `GET /server_info` | `max_num_batched_tokens`, `async_scheduling` |
| `hbm_...`, `dram_...` of `GET /server_info` | `device_...`, `host_...` |
| `cached_tokens_by_tier` of a usage (`hbm`, `dram`, `disk`) | `cached_tokens_details` (`device`, `host`, `storage`) |
| `peer_tokens` of a usage | `remote_tokens` |
| the command `combos` | `python tools/combos.py WORD ...`, in a clone |
| environment `PENSTOCK_PAIR_KEY`, `PENSTOCK_NODE_KEY` | `PENSTOCK_CLUSTER_KEY` |
| `--backends OP=native` | `OP=c` |
| `--backends OP=cuda` | what the operation runs there: `fa4`, `gluon`, `triton` or `torch`; `cuda` is CUDA C++ |

## Metrics

Both are exported for one release. The tiers `hbm`, `dram` and `disk` of the old ones are `device`, `host` and
`storage` of the new ones.

| old metric | new metric |
|---|---|
| `hbm_pages`, `dram_pages_free` and so on | `kv_pages`, `kv_pages_free` and so on, by `tier` |
| `kv_cache_usage_perc` | `kv_cache_usage_ratio` |
| `prefix_cache_hits_total` | `prefix_cache_hit_tokens_total` |
| `evicted_pages_total`, `forgotten_pages_total` | `kv_pages_evicted_total`, `kv_pages_forgotten_total` |
| `pool_bytes`, `cache_group_pages`, `cache_group_bytes` | `kv_pool_bytes`, `kv_group_pages`, `kv_group_bytes` |
| `moved_bytes_total`, `moves_total`, `moves_failed_total`, `move_seconds_total` | the same with `kv_` in front |
| `requests_hosted` | `requests_offloaded` |
| `rows_free`, `rows_looked_at_total` | `batch_slots_free`, `batch_slots_considered_total` |
| `selected_device_units_total` | `selected_device_blocks_total` |
| `pair_...`, `peer_ignored` | `pd_...`, `pd_ignored` |"""


def migration() -> str:
    """The document of old spellings, ending in a newline."""
    forms = {"--dram-bytes": "SIZE", "--dram-ratio": "2x, for example", "--host-tier": "auto", "--no-host-tier": "0"}
    rows = [(name, f"`{new}`") for name, new in old.RENAMED.items()]
    rows += [(name, f"`{old.SIZE}`: {form}") for name, form in forms.items()]
    rows += [(name, f"`{new.replace('=', ' ')}`") for name, new in old.SWITCHED.items()]
    rows += [("--kv-storage-sync", "none: a checksum finds pages that a power loss took"),
             ("--kv-storage-write-rate", "none: pages are stored as fast as the storage takes them")]
    return "\n".join([_MIGRATION, *(f"| `{name}` | {new} |" for name, new in rows), _OTHERS]) + "\n"


if __name__ == "__main__":
    print(migration() if "migration" in sys.argv else reference(), end="")
