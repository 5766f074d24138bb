"""Old spellings of flags, keyword arguments and body fields work, and mean what the new ones mean."""
from __future__ import annotations

import re
from pathlib import Path

import flags_reference
import pytest

from penstock.config.base import old_flags as old
from penstock.config.base.errors import ConfigError, RequestError
from penstock.config.request.params import SamplingParams
from penstock.config.settings.cli import Parser, add_flags, config_from, flags, from_options, prepare
from penstock.config.settings.file import FromFile
from penstock.config.settings.pairkey import node_key, pair_key
from penstock.config.settings.tree import ClusterConfig, Config

VALUES = {"bool": None, "int": "3", "float": "2.5", "bytes": "3M", "list": "a,b", "str": "x"}


def parsed(*argv: str) -> Config:
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    return config_from(parser.parse(prepare([*argv, "demo"])))


@pytest.mark.parametrize("name", old.RENAMED)
def test_old_flag_means_the_new_one_in_every_form(name: str, tmp_path: Path) -> None:
    new = old.RENAMED[name]
    [flag] = [flag for flag in flags() if new in flag.spellings]
    value = flag.choices[-1] if flag.choices else VALUES[flag.kind]
    field, renamed = name[2:].replace("-", "_"), new[2:].replace("-", "_")
    if value is None:
        assert parsed(name) == parsed(new) and parsed("--no-" + name[2:]) == parsed("--no-" + new[2:])
        value = "true"
    else:
        assert parsed(name, value) == parsed(new, value) == parsed(f"{name}={value}") != parsed()
    given: object = True if value == "true" else value
    assert from_options("demo", {field: given}) == from_options("demo", {renamed: given})
    (tmp_path / "old.yaml").write_text(f"{field}: {value}\n")
    assert prepare(FromFile(["--config", str(tmp_path / "old.yaml")]).words) == (
        [f"{new}={value}"] if value != "true" else [new])


@pytest.mark.parametrize("name", old.SWITCHED)
def test_old_switch_means_a_value_of_another_flag(name: str, tmp_path: Path) -> None:
    new, _, value = old.SWITCHED[name].partition("=")
    assert parsed(name) == parsed(new, value)
    on = not name.startswith("--no-")
    field = name.removeprefix("--no-").removeprefix("--").replace("-", "_")
    assert from_options("demo", {field: on}) == parsed(name)
    (tmp_path / "old.yaml").write_text(f"{field}: {str(on).lower()}\n")
    assert prepare(FromFile(["--config", str(tmp_path / "old.yaml")]).words) == [old.SWITCHED[name]]


@pytest.mark.parametrize("argv, said", [
    ("--kv-storage-sync", "--kv-storage-sync: .*leave it out"),
    ("--kv-storage-write-rate 1M", "--kv-storage-write-rate 1M: .*--kv-storage-write-policy")])
def test_removed_flag_is_refused_with_what_to_do(argv: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parsed(*argv.split())
    assert parsed("--no-kv-storage-sync") == parsed()


def test_seconds_to_wait_for_the_other_instance_follow_the_role() -> None:
    pair = parsed().pair
    assert (pair.kv_timeout_s, pair.bootstrap_timeout_s) == (300.0, 30.0)
    pair = parsed("--disaggregation-timeout-s", "7").pair
    assert pair.kv_timeout_s == pair.bootstrap_timeout_s == 7.0


@pytest.mark.parametrize("name", [*old.RENAMED, *old.SWITCHED, *old.FORMS, "--host-tier"])
def test_old_flag_stands_in_no_help_and_in_no_table(name: str) -> None:
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    for text in (parser.format_help(), flags_reference.reference()):
        assert not re.search(rf"(?<![\w-]){name}(?![\w-])", text) or name.startswith("--hicache")


@pytest.mark.parametrize("argv, size", [
    ("--dram-bytes 4096", "4KiB"), ("--dram-bytes 4097", "4097B"), ("--dram-bytes 2G", "2GiB"),
    ("--dram-bytes 0", "0"), ("--dram-ratio 2", "2x"), ("--hicache-ratio 0.5", "0.5x"),
    ("--hicache-size 20", "19531250KiB"),
    ("--kv-offloading-size 20", "20GiB"), ("--kv-offloading-size 1.5", "1536MiB"),
    ("--kv-offloading-size 3x", "3x"),
    ("--kv-offloading-size auto", "auto"), ("--kv-offloading-size 512M", "512MiB"), ("--host-tier", "auto"),
    ("--no-host-tier", "0"), ("--no-enable-hierarchical-cache", "0"), ("--enable-hierarchical-cache", "auto"),
    ("--enable-hierarchical-cache --hicache-ratio 2", "2x"),
    ("--hicache-size 1 --enable-hierarchical-cache", "1000000000B"),
    ("--enable-hierarchical-cache --kv-offloading-size 3", "3GiB"), ("", None)])
def test_host_memory_is_one_size(argv: str, size: str | None) -> None:
    kv = parsed(*argv.split()).kv
    assert kv.kv_offloading_size == size
    if size is not None:        # what is shown can be typed
        assert parsed("--kv-offloading-size", size).kv == kv


@pytest.mark.parametrize("argv", [
    "--dram-bytes 1G --dram-ratio 2", "--hicache-size 1 --hicache-ratio 2", "--no-host-tier --dram-bytes 1G",
    "--kv-offloading-size 1 --dram-bytes 1G", "--no-host-tier --kv-offloading-size 1"])
def test_two_sizes_of_host_memory_are_refused(argv: str) -> None:
    with pytest.raises(ConfigError, match="give the size of KV in host memory once"):
        parsed(*argv.split())


@pytest.mark.parametrize("value", ["much", "2y", "x", "-1", "1e400", "nan", "infx", "nanx"])
def test_host_memory_that_is_no_size_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="--kv-offloading-size"):
        parsed(f"--kv-offloading-size={value}")


def test_old_name_of_the_body_field_is_taken_and_both_are_refused() -> None:
    assert SamplingParams(top_k_tokens=64).checked() == SamplingParams(sparse_top_k=64).checked()
    with pytest.raises(RequestError, match="old name of sparse_top_k"):
        SamplingParams(top_k_tokens=64, sparse_top_k=64).checked()
    with pytest.raises(RequestError, match="sparse_top_k is -1"):
        SamplingParams(top_k_tokens=-1).checked()


def test_old_variables_of_the_secret_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_CLUSTER_KEY", raising=False)
    monkeypatch.setenv("PENSTOCK_PAIR_KEY", "p" * 16)
    monkeypatch.setenv("PENSTOCK_NODE_KEY", "n" * 16)
    assert (pair_key(ClusterConfig()), node_key(ClusterConfig())) == (b"p" * 16, b"n" * 16)
    monkeypatch.setenv("PENSTOCK_CLUSTER_KEY", "c" * 16)
    assert pair_key(ClusterConfig()) == node_key(ClusterConfig()) == b"c" * 16


def test_migration_document_is_as_written() -> None:
    assert (Path(__file__).parents[2] / "docs/reference/migration.md").read_text() == flags_reference.migration()
