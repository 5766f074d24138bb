"""Resolution against a made-up machine, the plain form, and reading a machine's files."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from penstock.config.base.errors import ConfigError
from penstock.config.base.machine import Machine, of_gpus, probe
from penstock.config.settings.cli import from_options
from penstock.config.settings.plain import from_plain, to_plain
from penstock.config.settings.resolve import lines, resolve
from penstock.config.streams.frames import FrameBuffer
from penstock.engine import wire

MACHINE = Machine(system="Linux", machine="x86_64", python="3.11", cpu="test", features=(),
                   cores=6, memory_total=8 << 30, memory_available=4 << 30)


def test_what_was_left_open_is_filled_in() -> None:
    config = resolve(from_options("demo", {"max_num_seqs": 5}), MACHINE)
    assert config.schedule.max_waiting == 20
    assert config.device.threads == 6 and config.device.device == "cpu"
    assert config.model.dtype == "float32"
    given = resolve(from_options("demo", {"threads": 1, "max_waiting": 0, "dtype": "bfloat16"}),
                    MACHINE)
    assert (given.device.threads, given.schedule.max_waiting, given.model.dtype) == (
        1, 0, "bfloat16")


@pytest.mark.parametrize("options", [{}, {"dram_bytes": 5}, {"dram_ratio": 2}, {"host_tier": True}])
def test_resolving_twice_changes_nothing(options: dict[str, object]) -> None:
    once = resolve(from_options("demo", options), MACHINE)
    assert resolve(once, MACHINE) == once


GPU = replace(MACHINE, gpus=("NVIDIA H200",), torch_cuda="13.0")


def test_the_device_is_the_gpu_where_torch_can_use_it() -> None:
    auto = resolve(from_options("demo", {}), GPU)
    assert (auto.device.device, auto.model.dtype, auto.kv.gpu_memory_utilization) == ("cuda", "auto", 0.9)
    assert auto.schedule.max_num_batched_tokens is None                # the model tells
    assert resolve(auto, GPU) == auto
    # Steps of several stages: few requests decode in one step on GPUs, which gave 1.4 times the tokens/s of two halves.
    on_gpus = replace(GPU, gpus=GPU.gpus * 2)
    for given, rows in ({}, 32), ({"pp_together": 3}, 3), ({"device": "cpu"}, 1), (
            {"nnodes": 2, "node_rank": 0, "dist_init_addr": "127.0.0.1:7000"}, 1):
        assert resolve(from_options("demo", {"pp": 2, **given}), on_gpus).device.pp_together == rows
    asked = resolve(from_options("demo", {"device": "cpu"}), GPU)
    assert (asked.device.device, asked.model.dtype, asked.kv.gpu_memory_utilization) == ("cpu", "float32", 0.3)
    assert asked.schedule.num_step_tokens == 512
    # KV of the device is not of the host's memory
    assert resolve(from_options("demo", {"hbm_bytes": 100 << 30}), GPU).kv.kv_cache_memory_bytes == 100 << 30
    for machine, why in ((MACHINE, ""), (replace(GPU, torch_cuda=""), "CPU build")):
        assert resolve(from_options("demo", {}), machine).device.device == "cpu"
        with pytest.raises(ConfigError, match=f"--device cuda: .*{why}.*; take --device cpu"):
            resolve(from_options("demo", {"device": "cuda"}), machine)
    two = replace(GPU, gpus=GPU.gpus * 2)               # engines measure what is free of GPUs of their own
    resolve(from_options("demo", {"dp": 2}), two)
    for asked in ({"dp": 3}, {"dp": 2, "tp": 2}):
        with pytest.raises(ConfigError, match="several engines share a GPU"):
            resolve(from_options("demo", asked), two)


def test_more_memory_than_there_is_names_both_numbers() -> None:
    with pytest.raises(ConfigError) as e:
        resolve(from_options("demo", {"hbm_bytes": 3 << 30, "dram_bytes": 2 << 30}), MACHINE)
    assert str(e.value) == ("--kv-cache-memory-bytes 3GiB, --kv-offloading-size 2GiB: together more than the "
                            "4.0 GiB of memory that are free here")


def test_lines_name_every_value() -> None:
    shown = dict(line.split(" ", 1) for line in lines(resolve(from_options("demo", {}), MACHINE)))
    assert shown["model"] == "demo" and shown["sparse_block_size"] == "8" and shown["tokenizer"] == "-"
    assert shown["threads"] == "6"


def test_plain_form_survives_the_wire() -> None:
    config = resolve(from_options("demo", {"backends": ["a=b"], "drain_s": 2, "chat_template": "t"}),
                     MACHINE)
    hello = wire.Hello(version=wire.VERSION, config=to_plain(config))
    [read] = FrameBuffer(wire.TO_ENGINE).feed(wire.TO_ENGINE.frames(hello))
    assert isinstance(read, wire.Hello)
    assert from_plain(read.config) == config
    assert from_plain(json.loads(json.dumps(to_plain(config)))) == config


def test_keys_do_not_travel_to_the_engine() -> None:
    config = from_options("demo", {"api_key": "marker-7"})
    assert b"marker-7" not in msgspec.msgpack.encode(to_plain(config))
    assert from_plain(to_plain(config)).server.api_key is None


@pytest.mark.parametrize("change", [
    {"kv": {"page_size": "16"}}, {"kv": {"pages": 1}}, {"zzz": {}}, {"model": {}},
    {"model": {"model": "demo", "dtype": "float16"}}, {"kv": {"page_size": 1.5}}])
def test_plain_data_of_another_shape_is_refused(change: dict[str, dict[str, object]]) -> None:
    with pytest.raises(ConfigError):
        from_plain({**to_plain(from_options("demo", {})), **change})


# ---------------------------------------------------------------- the machine
def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


CPUINFO = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma avx512f nonsense\n"
MEMINFO = "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    900 kB\n"


def test_probe_reads_a_plain_machine(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": CPUINFO, "proc/meminfo": MEMINFO})
    found = probe(tmp_path)
    assert found.cpu == "Some CPU" and found.features == ("avx2", "fma", "avx512f")
    assert (found.memory_total, found.memory_available) == (1000 * 1024, 900 * 1024)
    assert found.gpus == () and "driver" in found.no_gpu


def test_probe_respects_omp_num_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    for wanted, cores in (("3", 3), ("99", 8), ("", 8), ("0", 8), ("4,2", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
        assert probe(tmp_path).cores == cores


def test_probe_respects_a_cgroup(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": CPUINFO, "proc/meminfo": MEMINFO,
                     "sys/fs/cgroup/memory.max": "512000\n",
                     "sys/fs/cgroup/memory.current": "300000\n",
                     "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 100000\n",
                     "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    found = probe(tmp_path)
    assert found.memory_total == 512000
    assert found.memory_available == 512000 - 200000        # file cache can be reclaimed
    assert found.cores == 1


def test_probe_without_any_file_still_answers(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert found.cores >= 1 and found.memory_available > 0 and found.features == ()


def test_probe_names_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"proc/driver/nvidia/gpus/0000:01/information": "Model: \t NVIDIA H200\n"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert probe(tmp_path).gpus == ("NVIDIA H200",)
    for shown, gpus in (("0", 1), ("GPU-1a", 1), ("", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        found = probe(tmp_path)
        assert len(found.gpus) == gpus and ("hides" in found.no_gpu) == (not gpus), shown
    write(tmp_path, {"proc/driver/nvidia/gpus/0000:02/information": "Model: \t NVIDIA H100\n"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert probe(tmp_path).gpus == ("NVIDIA H100", "NVIDIA H200")
    assert of_gpus([1])["CUDA_VISIBLE_DEVICES"] == "0"


def test_engines_go_over_the_gpus() -> None:
    pairs = from_options("m", {"tp": 2, "dp": 3})
    assert [pairs.gpus_of(n, 8) for n in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [pairs.gpus_of(n, 3) for n in range(3)] == [[0, 1], [2, 0], [1, 2]]
    assert [pairs.gpus_of(n, 1) for n in range(3)] == [[0]] * 3
    nodes = from_options("m", {"tp": 2, "pp": 3, "nnodes": 2})
    assert nodes.ranks_here == 4 and nodes.gpus_of(1, 8) == [4, 5, 6, 7]         # as its larger half needs


def test_two_starts_do_not_sample_the_same() -> None:
    drawn = {resolve(from_options("demo", {}), MACHINE).model.seed for _ in range(4)}
    assert len(drawn) > 1 and None not in drawn
    assert resolve(from_options("demo", {"seed": 7}), MACHINE).model.seed == 7
    dummy = from_options("demo", {"load_format": "dummy"})
    assert resolve(dummy, MACHINE).model.seed == 0         # the same weights every time
