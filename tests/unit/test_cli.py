"""The generated command line: spellings of both peers, refusals by name, number formats."""
from __future__ import annotations

import json
import shlex
import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import COMMANDS, main
from penstock.config.base.errors import ConfigError
from penstock.config.base.machine import probe
from penstock.config.base.sizes import parse_bytes, show_bytes
from penstock.config.settings.cli import (
    Parser,
    add_flags,
    config_from,
    flags,
    from_options,
    prepare,
)
from penstock.config.settings.resolve import resolve
from penstock.config.settings.tree import SERVE_ONLY, Config, KVConfig
from penstock.config.settings.unbuilt import ALWAYS, UNBUILT
from penstock.llm.llm import LLM

HELP_WIDTH = 74         # columns of the help texts


def parse(line: str) -> Config:
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    return config_from(parser.parse(prepare(shlex.split(line))))


def value(config: Config, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def test_defaults_are_those_of_the_tree() -> None:
    config = parse("demo")
    assert config.model.model == "demo"
    for flag in flags():
        if flag.dest != "model.model":
            assert value(config, flag.dest) == flag.default


TYPED = {"str": ("text", "text"), "int": ("7", 7), "float": ("0.5", 0.5),
         "bytes": ("3MiB", 3 << 20), "list": ("linear=reference", ("linear=reference",)), "host": ("3", "3GiB")}


@pytest.mark.parametrize(("spelling", "flag"),
                         [(s, f) for f in flags() for s in f.spellings if f.dest != "model.model"])
def test_every_spelling_sets_its_field(spelling: str, flag: Any) -> None:
    if flag.kind == "bool":
        assert value(parse(f"demo {spelling}"), flag.dest) is True
        assert value(parse(f"demo --no-{spelling[2:]}"), flag.dest) is False
        return
    text, expected = (flag.choices[-1],) * 2 if flag.choices else TYPED[flag.kind]
    assert value(parse(f"demo {spelling} {text}"), flag.dest) == expected
    assert value(parse(f"{spelling}={text} demo"), flag.dest) == expected


# What PEERS.md lists, and what it must set.
@pytest.mark.parametrize(("line", "path", "expected"), [
    ("--context-length 64", "model.max_model_len", 64),
    ("--max-model-len 64", "model.max_model_len", 64),
    ("--max_model_len 64", "model.max_model_len", 64),
    ("--max-running-requests 3", "schedule.max_num_seqs", 3),
    ("--gpu-memory-utilization 0.5", "kv.gpu_memory_utilization", 0.5),
    ("--mem-fraction-static 0.5", "kv.gpu_memory_utilization", 0.5),
    ("--block-size 32", "kv.page_size", 32),
    ("--chunked-prefill-size 9", "schedule.max_num_batched_tokens", 9),
    ("--max-num-batched-tokens 9", "schedule.max_num_batched_tokens", 9),
    ("--disable-radix-cache", "kv.prefix_cache", False),
    ("--no-enable-prefix-caching", "kv.prefix_cache", False),
    ("--disable-overlap-schedule", "schedule.async_scheduling", False),
    ("--device cuda", "device.device", "cuda"), ("--enforce-eager", "device.cuda_graphs", False),
    ("--disable-cuda-graph", "device.cuda_graphs", False),
    ("--load-format dummy", "model.load_format", "dummy"),
    ("--tokenizer-path t", "model.tokenizer", "t"),
    ("--served-model-name m,n", "model.served_model_name", ("m", "n")),
    ("--api-key k", "server.api_key", "k"),
    ("--backends a=b,c=d --backends e=f", "device.backends", ("a=b", "c=d", "e=f")),
    ("--page-size 8 --page-size 4", "kv.page_size", 4),
    ("-tp 2", "device.tp", 2), ("--tensor-parallel-size 3", "device.tp", 3), ("--ep-size 2", "device.ep", 2),
    ("--enable-expert-parallel", "device.ep", 0), ("--enable-ep-moe", "device.ep", 0),
])
def test_spellings_that_users_type(line: str, path: str, expected: object) -> None:
    assert value(parse(f"demo {line}"), path) == expected


@pytest.mark.parametrize("line", [
    "-tp 1", "--tp-size 1", "--tensor-parallel-size=1", "-pp 1", "--pp-size 1", "-dp 1",
    "--kv-cache-dtype auto", "--device cpu", "--load-format auto",
    "--quantization none", "--swap-space 0", "--cpu-offload-gb 0", "--no-enable-lora",
    "--no-trust-remote-code", "--trust_remote_code=false", "--schedule-policy fcfs",
    "--speculative-algorithm none", "--hicache-write-policy write_through", *ALWAYS])
def test_asking_for_what_happens_anyway_changes_nothing(line: str) -> None:
    changed = parse(f"{line} demo")
    assert changed == parse("demo" + (" --device cpu" if "--device" in line else ""))


@pytest.mark.parametrize(("line", "feature"), [
    ("--distributed-executor-backend ray", "--nnodes"), ("--master-addr h", "--dist-init-addr"),
    ("--hicache-write-policy write_back", "only write_through and write_through_selective are"),
    ("--hicache-mem-layout x", "one layout"),
    ("--kv-offloading-backend lmcache", "only native"),
    ("--hicache-storage-backend hf3fs", "--kv-storage"), ("--disk-bytes 1G", "--kv-storage"),
    ("--hicache-storage-backend-extra-config {}", "give --hicache-storage-backend as well"),
    ("--disaggregation-bootstrap-port 8998", "--disaggregation-connect"),
    ("--disaggregation-decode-tp 2", "other settings of disaggregation"),
    ("--kv-transfer-config {}", "--disaggregation-mode"),
    ("--kv-cache-dtype fp8_e5m2", "than bfloat16 or fp8"), ("--device tpu", "NVIDIA GPU"),
    ("--trust-remote-code", "security"), ("--trust_remote_code", "security"),
    ("--quantization bitsandbytes", "choose from auto, fp8"), ("--speculative-eagle-topk 2", "not a tree"),
    ("--speculative-algorithm EAGLE", "nextn. and eagle3 are what"), ("--speculative-config {}", "say how"),
    ('--speculative-config \'{"method": "medusa"}\'', "method medusa: ngram, mtp"),
    ('--speculative-config \'{"method": "eagle3", "model": 3}\'', "model is 3: a folder"),
    ('--speculative-config \'{"method": "ngram", "draft": "x"}\'', "'draft' is not a key"),
    ('--speculative-config \'{"method": "ngram", "num_speculative_tokens": 0}\'', "a whole number of"),
    ("--speculative-num-draft-tokens 1", "from 2 on"),
    ("--speculative-ngram-max-bfs-breadth 2", "--prompt-lookup"),
    ("--speculative-draft-model-revision x", "a model that drafts"), ("--enable-lora", "LoRA"),
    ("--lora-paths x", "LoRA"), ("--max-loras 2", "LoRA"), ("--dtype float16", "float16"),
    ("--load-format pt", "runs code"), ("--swap-space 4", "--kv-offloading-size"),
    ("--cpu-offload-gb 4", "offloading weights"), ("--ssl-ca-certs k", "TLS"),
    ("--no-enable-chunked-prefill", "cannot be turned off"),
])
def test_unbuilt_features_are_refused_by_name(line: str, feature: str) -> None:
    with pytest.raises(ConfigError, match=feature) as e:
        parse(f"{line} demo")
    given = shlex.split(line)[0].partition("=")[0].replace("_", "-")
    assert str(e.value).startswith(given) and "\n" not in str(e.value)


def test_refusal_says_what_is_accepted() -> None:
    with pytest.raises(ConfigError) as e:
        parse("demo --tokenizer-worker-num 2")
    assert str(e.value) == ("--tokenizer-worker-num 2: more than one API process is not built yet; only 1 is "
                            "accepted")


def test_no_unbuilt_spelling_hides_a_flag_of_ours() -> None:
    """An entry that names a real flag must list every choice of it, or it would refuse one."""
    for flag in flags():
        for entry in UNBUILT:
            for spelling in flag.spellings:
                if spelling in entry.flags:
                    assert entry.neutral == flag.choices
                assert not any(f.endswith("*") and spelling.startswith(f[:-1])
                               for f in entry.flags), (spelling, entry)


@pytest.mark.parametrize(("line", "message"), [
    ("demo --page-sise 3", "did you mean --page-size"),
    ("demo --tensor-paralel-size 2", "did you mean --tensor-parallel-size"),
    ("demo --zzz", "is not a flag of penstock serve: see penstock serve --help"),
    ("demo --page-s 3", "did you mean --page-size"),
    ("demo other", "'other' is one argument too many"),
    ("demo --model other", "'other' is one argument too many"),
    ("--served-model-name a b demo", "'demo' is one argument too many: put MODEL first, or give it by"),
    ("--served-model-name a b --port 1 demo", "put MODEL first, or give it by --model, where --served-model"),
    ("--model", "a folder, a .gguf file"),
    ("", "MODEL is missing"),
    ("demo --page-size", "--page-size/--block-size: a value is needed"),
    ("demo --page-size x", "--page-size x: a whole number"),
    ("demo --page-size 1.5", "--page-size 1.5: a whole number"),
    ("demo --gpu-memory-utilization x", "--gpu-memory-utilization x: a number"),
    ("demo --kv-cache-memory-bytes 3Q", "--kv-cache-memory-bytes: '3Q' is not a size"),
    ("demo --log-level loud", "choose from debug, info"),
])
def test_wrong_usage_is_one_clear_line(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as e:
        parse(line)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(("line", "kv"), [
    ("--enable-hierarchical-cache", KVConfig(kv_offloading_size="auto")),
    ("--hicache-size 30", KVConfig(kv_offloading_size="29296875KiB")),
    ("--hicache_size=1.5", KVConfig(kv_offloading_size="1500000000B")),
    ("--kv-offloading-size 4", KVConfig(kv_offloading_size="4GiB")),
    ("--hicache-ratio 2", KVConfig(kv_offloading_size="2x")),
    ("--hicache-size 0", KVConfig(kv_offloading_size="0")),
    ("--hicache-storage-prefetch-policy best_effort", KVConfig(kv_storage_policy="best_effort")),
    ("--hicache-write-policy=write_through_selective",
     KVConfig(kv_storage_write_policy="write_through_selective")),
    ("--hicache-storage-backend none --hicache_storage_backend_extra_config=null", KVConfig()),
    ("--enable-hierarchical-cache --hicache-ratio 1.5 --hicache-write-policy write_through",
     KVConfig(kv_offloading_size="1.5x"))])
def test_the_peers_words_for_the_host_tier(line: str, kv: KVConfig) -> None:
    assert parse(f"{line} demo").kv == kv


@pytest.mark.parametrize(("line", "kv"), [
    ("--enable-hisparse", KVConfig(host_decode="auto")), ("--host-decode always", KVConfig(host_decode="always")),
    ("--enable_hisparse --hisparse-config {}", KVConfig(host_decode="auto")),
    ("--hisparse-config '{\"top_k\": 512, \"device_buffer_size\": 1024, \"host_to_device_ratio\": 2}' "
     "--enable-hisparse",
     KVConfig(host_decode="auto", sparse_top_k=512, hot_buffer_tokens=1024, kv_offloading_size="2x")),
    ("--sparse-top-k 512 --sparse-dense-layers 0,1",
     KVConfig(sparse_top_k=512, sparse_dense_layers=("0", "1")))])
def test_the_peers_words_for_sparse_decode(line: str, kv: KVConfig) -> None:
    assert parse(f"{line} demo").kv == kv


@pytest.mark.parametrize("line", [
    "--speculative-method ngram --speculative-tokens 5 --prompt-lookup-max 6",
    '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6}\'',
    "--speculative_algorithm NGRAM --speculative-num-draft-tokens 6 --prompt-lookup-max=6"])
def test_speculation_as_peers_ask_for_it(line: str) -> None:
    schedule = parse(f"{line} demo --device cpu").schedule
    assert (schedule.speculative_method, schedule.num_drafts) == ("ngram", 5)
    assert (schedule.prompt_lookup_min, schedule.prompt_lookup_max) == (2, 6)


@pytest.mark.parametrize("line", [
    "--speculative-method eagle3 --speculative-model x --speculative-tokens 5",
    '--speculative-config \'{"method": "eagle3", "model": "x", "num_speculative_tokens": 5}\'',
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path x --speculative-num-steps 5 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 6"])
def test_a_layer_that_drafts_as_peers_ask_for_it(line: str) -> None:
    schedule = parse(f"{line} demo --device cpu").schedule
    assert (schedule.speculative_method, schedule.speculative_model) == ("eagle3", "x")
    assert schedule.num_drafts == 5


@pytest.mark.parametrize(("line", "said"), [
    ("--speculative-tokens 4", "give --speculative-method ngram or mtp or eagle3 as well"),
    ("--speculative-draft-model-path x --speculative-method ngram", "give --speculative-method eagle3"),
    ("--speculative-algorithm EAGLE3", "give --speculative-model FOLDER"),
    ("--speculative-method mtp --prompt-lookup-min 3", "give --speculative-method ngram as well"),
    ("--speculative-method ngram --speculative-tokens 16", "1 to 15"),
    ("--speculative-method ngram --prompt-lookup-min 5", "at least --prompt-lookup-min")])
def test_speculation_that_is_refused(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(parse(f"{line} demo"), probe())


@pytest.mark.parametrize(("text", "said"), [
    ("{\"top_k\": 512, \"swap_in\": 1}", "'swap_in' is not a key that penstock has; it has top_k, device_b"),
    ("{\"top_k\": 0.5}", "top_k is 0.5: a whole number"), ("{\"top_k\": true}", "top_k is true"),
    ("{\"device_buffer_size\": -1}", "device_buffer_size is -1"),
    ("{\"host_to_device_ratio\": \"2\"}", "host_to_device_ratio is \"2\": a number"),
    ("{\"host_to_device_ratio\": Infinity}", "a number is needed"),
    ("top_k=1", "a JSON object is needed"), ("[1]", "a JSON object"), ("", "a JSON object")])
def test_what_hisparse_config_may_not_say(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as e:
        prepare(["demo", "--enable-hisparse", "--hisparse-config", text])
    assert str(e.value).startswith("--hisparse-config") and said in str(e.value)


def test_the_folder_of_the_file_backend_is_one_that_the_user_names(monkeypatch) -> None:
    variable = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
    monkeypatch.setenv(variable, "/a b")
    for line in (["--hicache-storage-backend", "file"],
                 ["--hicache-storage-backend-extra-config={}", "--hicache-storage-backend=file"]):
        assert prepare(["demo", *line]) == ["demo", "--kv-storage=file:///a%20b"]
    assert prepare(["demo", "--hicache-storage-backend=mooncake", "--hicache-storage-backend-extra-config",
                    '{"master_server_address": "here:50051"}']) == ["demo", "--kv-storage=mooncake://here:50051"]
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(ConfigError, match="say where its master is"):
        prepare(["demo", "--hicache-storage-backend=mooncake"])
    for name, wrong in (("protocol", "rdma"), ("global_segment_size", "4gb"), ("metadata_server", "http://a"),
                        ("device_name", ["mlx5_0"])):
        with pytest.raises(ConfigError, match=f"{name} is"):
            prepare(["demo", "--hicache-storage-backend=mooncake", "--hicache-storage-backend-extra-config",
                     json.dumps({"master_server_address": "here:50051", name: wrong})])
    monkeypatch.setenv("MOONCAKE_MASTER", "there:7")
    assert prepare(["demo", "--hicache-storage-backend=mooncake", "--hicache-storage-backend-extra-config",
                    '{"protocol": "tcp", "global_segment_size": 0, "metadata_server": "P2PHANDSHAKE"}']) == [
        "demo", "--kv-storage=mooncake://there:7"]
    for wrong in (["--hicache-storage-backend-extra-config", '{"tp_lcm_size": 2}'],
                  ["--hicache-storage-backend-extra-config", "x"], ["--kv-storage=file:///c"]):
        with pytest.raises(ConfigError, match=r"is not a key|a JSON object is needed|give one"):
            prepare(["demo", "--hicache-storage-backend", "file", *wrong])
    for nowhere in ("", "relative"):
        monkeypatch.setenv(variable, nowhere)
        with pytest.raises(ConfigError, match="file:///DIR"):
            prepare(["demo", "--hicache-storage-backend", "file"])


def test_hisparse_config_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --enable-hisparse as well"):
        prepare(["demo", "--hisparse-config", "{}"])


@pytest.mark.parametrize("number", ["30G", "-1", "", "1e9", "nan"])
def test_a_size_in_a_unit_is_a_plain_number(number: str) -> None:
    with pytest.raises(ConfigError, match=r"--hicache-size.*a number of GB is needed \(or --kv-offloading-size"):
        prepare(["demo", "--hicache-size", *filter(None, [number])])


@pytest.mark.parametrize(("text", "size"), [
    ("0", 0), ("4096", 4096), ("1e9", 10**9), ("512M", 512 << 20), ("512MiB", 512 << 20),
    ("4GiB", 4 << 30), ("4g", 4 << 30), ("1.5GiB", 3 << 29), ("2GB", 2 * 10**9), ("1T", 1 << 40),
    ("10 KB", 10**4), ("7B", 7), ("1_000", 1000), ("9007199254740993", 9007199254740993)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "G", "1X", "1.5.5G", "nan", "inf", "1e99", "0x10",
                                  "9999999999T", "1 2", "٣"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_shown_sizes_read_back(size: int) -> None:
    assert parse_bytes(show_bytes(size)) == size


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        assert parse_bytes(text) >= 0
    except ConfigError:
        pass


def test_keyword_arguments_equal_the_command_line() -> None:
    options = {"tensor_parallel_size": 1, "page_size": 8, "enable_prefix_caching": False,
               "hbm_bytes": 1 << 20, "backends": ("a=b", "c=d"), "max_model_len": None,
               "gpu_memory_utilization": 0.25, "enforce_eager": True, "trust_remote_code": False}
    line = ("demo --page-size 8 --no-prefix-cache --kv-cache-memory-bytes 1M --backends a=b,c=d "
            "--gpu-memory-utilization 0.25 --no-cuda-graphs")
    assert from_options("demo", options) == parse(line)
    assert from_options("-odd name", {}).model.model == "-odd name"
    with pytest.raises(ConfigError, match="data-parallel attention"):
        from_options("demo", {"enable_dp_attention": True})
    with pytest.raises(ConfigError, match="did you mean --page-size"):
        from_options("demo", {"page_sizes": 2})


# ---------------------------------------------------------------- the whole command
def test_errors_leave_by_stderr_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["serv"], ["serve"], ["serve", "demo", "--nnodes", "2"], ["doctor", "--tru"],
                 ["serve", "demo", "--page-size", "0", "--gpu-memory-utilization", "2"]):
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err
        assert all(line.startswith("penstock: error: ") for line in err.splitlines())
    assert len(err.splitlines()) == 2           # every reason, not only the first


def test_numbers_of_a_command_are_refused_in_the_same_words(
        capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "--prompt", "x", "--max-tokens", "x"]) == 2
    assert "--max-tokens x: a whole number is needed" in capsys.readouterr().err


def test_usage_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0


def test_serve_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["serve", "--help"])
    assert e.value.code == 0
    shown = capsys.readouterr().out
    for flag in flags():
        if flag.dest != "model.model":
            assert all(s in shown for s in (*flag.spellings, *flag.inverse))


def test_help_texts_fit_two_lines() -> None:
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    texts = {action.dest: action.help or "" for action in parser._actions}
    assert not {dest: text for dest, text in texts.items() if len(textwrap.wrap(text, HELP_WIDTH)) > 2}


def test_values_for_models_that_are_not_supported_are_taken_and_not_listed() -> None:
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    [shown] = [action.metavar for action in parser._actions if action.dest == "model.reasoning_parser"]
    names = set(shown.strip("{}").split(","))
    assert names >= {"gpt_oss", "minimax_m3"} and not names & {"gemma4", "kimi_vl"}
    assert parse("demo --reasoning-parser gemma4").model.reasoning_parser == "gemma4"


def test_printed_config_hides_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", "--api-key", "marker-7", "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "api_key (set)" in shown and "max_waiting 64" in shown and "marker-7" not in shown
    assert "marker-7" not in repr(parse("demo --api-key marker-7"))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also proves that no flag of a command collides with one of the tree."""
    with pytest.raises(SystemExit) as e:
        main([*name.split(), "--help"])
    assert e.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: penstock {name}")


# ---------------------------------------------------------------- flags that a command cannot use
@pytest.mark.parametrize("command", ["chat", "generate", "bench"])
@pytest.mark.parametrize("dest", sorted(SERVE_ONLY))
def test_a_flag_of_the_server_is_not_ignored_elsewhere(
        command: str, dest: str, capsys: pytest.CaptureFixture[str]) -> None:
    [flag] = [f for f in flags() if f.dest == dest]
    for spelling in flag.spellings:
        assert main([command, spelling, "1", "demo"]) == 2
        assert f"error: {spelling} is a flag of penstock serve" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="is a flag of penstock serve"):
            LLM("demo", **{spelling.lstrip("-").replace("-", "_"): "1"})
    assert main([command, "demo", "--print-config"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert dest.split(".")[1] not in shown and "page_size" in shown


@pytest.mark.parametrize("words", [["doctor"], ["bench", "--base-url", "http://127.0.0.1:1"]])
def test_a_flag_without_the_model_that_it_is_for_is_not_ignored(
        words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--page-size", "4"]) == 2
    assert "error: --page-size needs a MODEL" in capsys.readouterr().err
