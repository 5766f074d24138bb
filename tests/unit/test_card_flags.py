"""Flags as model cards, recipes and other engines' documents have them, and flags from a file."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.config.base.errors import ConfigError
from penstock.config.base.machine import probe
from penstock.config.settings.cli import Parser, add_flags, config_from, flags, from_options, prepare
from penstock.config.settings.file import FromFile
from penstock.config.settings.resolve import resolve
from penstock.config.settings.tree import Config
from penstock.config.settings.unbuilt import UNBUILT

LINES = [line for line in (Path(__file__).parents[1] / "data/card_flags.txt").read_text().splitlines()
         if not line.startswith("#")]

# What these lines ask for is so without them. All other lines that are taken must change a setting.
NEUTRAL = ("--enable-prompt-tokens-details", "--hf-overrides {}", "--json-model-override-args {}",
           "--chat-template-kwargs {}", "--max-logprobs 20", "--enable-chunked-prefill",
           "--mamba-cache-dtype auto", "--cpu-offload-gb 0", "--schedule-conservativeness 1.0",
           "--stream-interval 1", "--model-loader-extra-config {}", "--weight-loader-disable-mmap",
           "--enable-metrics", "--model-impl auto", "--task generate", "--language-model-only", "-m demo")
YARN = '{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":2048}'
SET: dict[str, tuple[str, Any]] = {
    "--kv-cache-memory-bytes 1073741824": ("kv.kv_cache_memory_bytes", 1 << 30),
    "--download-dir /x": ("model.download_dir", "/x"),
    '--default-chat-template-kwargs {"enable_thinking":false}':
        ("model.default_chat_template_kwargs", '{"enable_thinking":false}'),
    "--no-enable-prefix-caching": ("kv.prefix_cache", False),
    "--kv-offloading-size 8": ("kv.host_bytes", 8 << 30),
    '--enable-hisparse --hisparse-config '
    '{"top_k":2048,"device_buffer_size":4096,"host_to_device_ratio":2}':
        ("kv.sparse_top_k", 2048),
    "--disaggregation-mode decode": ("pair.disaggregation_mode", "decode"),
    "--disaggregation-transfer-backend mooncake": ("pair.disaggregation_transfer_backend", "mooncake"),
    '--allowed-origins ["*"]': ("server.cors_origins", ("*",)),
    "--otlp-traces-endpoint http://x": ("server.otlp_traces_endpoint", "http://x"),
    "--tokenizer-path /x": ("model.tokenizer", "/x"),
    "--hicache-ratio 2": ("kv.host_ratio", 2.0), "--hicache-size 30": ("kv.host_bytes", 30 * 10**9),
    "-c 4096": ("model.max_model_len", 4096), "--ctx-size 4096": ("model.max_model_len", 4096),
    "-ngl 99": ("device.gpu_layers", 99), "--n-gpu-layers 99": ("device.gpu_layers", 99),
    "-np 4": ("schedule.max_num_seqs", 4), "--parallel 4": ("schedule.max_num_seqs", 4),
    "-t 2": ("device.threads", 2),
    "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3":
        ("model.tool_call_parser", "hermes"),
    "--generation-config vllm": ("model.generation_config", "vllm"),
    "--override-generation-config {}": ("model.override_generation_config", "{}"),
    "--sampling-defaults openai": ("model.generation_config", "none"),
    "--quantization fp8": ("model.quantization", "fp8"),
    "--served-model-name a b": ("model.served_model_name", ("a", "b")),
    f'--hf-overrides {{"rope_scaling":{YARN}}}': ("model.hf_overrides", f'{{"rope_scaling":{YARN}}}'),
    f"--rope-scaling {YARN}": ("model.hf_overrides", json.dumps({"rope_scaling": json.loads(YARN)})),
    "--admin-api-key x": ("server.admin_api_key", "x"),
    "--disable-log-stats": ("server.log_stats_interval", 0.0),
    "--decode-log-interval 40": ("server.log_stats_interval", 40.0),
    "--uvicorn-log-level warning": ("server.log_level_http", "warning"),
    "--log-level-http warning": ("server.log_level_http", "warning"),
    "--disable-uvicorn-access-log": ("server.access_log", False),
}
# Flags that other parts of the command line own.
ELSEWHERE: tuple[str, ...] = ()


def parse(words: list[str], model: str = "demo") -> Config:
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    return config_from(parser.parse(prepare([*([model] if "-m" not in words else []), *words])))


def value(config: Config, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize("line", [line for line in LINES if not any(w in ELSEWHERE for w in line.split())])
def test_flag_of_a_card_is_taken_or_refused_by_name(line: str, tmp_path: Path) -> None:
    words = line.split(" ")
    if line == "--config f.yaml":
        assert of_file(tmp_path, "page-size: 8", "demo").kv.page_size == 8
        return
    if line in SET:
        path, expected = SET[line]
        assert value(parse(words), path) == expected
        return
    if words[0] in ("--reasoning-parser", "--tool-call-parser"):
        assert value(parse(words), f"model.{words[0][2:].replace('-', '_')}") != "auto"
        return
    if line in NEUTRAL:
        found = parse(words)
        changed = {f.dest for f in flags() if f.dest != "model.model" and value(found, f.dest) != f.default}
        assert changed <= {"model.hf_overrides", "model.default_chat_template_kwargs"}
        assert all(value(found, dest) == "{}" for dest in changed)
        return
    with pytest.raises(ConfigError) as e:
        parse(words)
    said = str(e.value)
    assert said.startswith(words[0]) and "\n" not in said and "is not a flag" not in said
    assert len(said.partition(": ")[2]) > 20, "says what to do"


def test_every_line_of_the_cards_is_looked_at() -> None:
    assert len(LINES) > 70 and set(SET) | set(NEUTRAL) <= set(LINES)


# ---------------------------------------------------------------- llama.cpp's and vLLM's ways of writing
@pytest.mark.parametrize(("line", "path", "expected"), [
    ("-c 0", "model.max_model_len", None), ("-np -1", "schedule.max_num_seqs", 16),
    ("-t -1", "device.threads", None),
    ("-ngl all", "device.gpu_layers", None), ("-ngl -1", "device.gpu_layers", None),
    ("--gpu-layers 0", "device.gpu_layers", 0), ("-b 512", "schedule.max_num_batched_tokens", 512),
    ("-hf org/name", "model.model", "org/name"), ("--rope-scaling none", "model.hf_overrides", None),
    ("--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768", "model.hf_overrides",
     '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}'),
    *((f'--rope-scaling {{"factor":2}} {name} {{"a":1}}', "model.hf_overrides",
       '{"a": 1, "rope_scaling": {"factor": 2}}') for name in ("--hf-overrides", "--json-model-override-args")),
    ("--allowed-origins https://a.example,https://b.example", "server.cors_origins",
     ("https://a.example", "https://b.example"))])
def test_values_that_peers_write_in_another_way(line: str, path: str, expected: object) -> None:
    words = line.split()
    assert value(parse(words) if "-hf" not in words else config_from_words(words), path) == expected


def config_from_words(words: list[str]) -> Config:
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    return config_from(parser.parse(prepare(words)))


@pytest.mark.parametrize(("line", "said"), [
    ("--rope-scaling yarn", "Give --rope-scale N as well"), ("--rope-scale 4", "say which scaling"),
    ("--rope-scaling linear --rope-scale x", "numbers are needed"),
    ('--rope-scaling {"factor":2} --rope-scale 4', "leave them out"),
    ("--rope-scaling [1]", "--rope-scaling .1.: a JSON object is needed$"),
    ('--rope-scaling {"factor":2} --hf-overrides {"rope_parameters":{}}', "give one of them"),
    ("--sampling-defaults x", "choose from model, openai"),
    ("--allowed-origins [1]", "a JSON list of origins"), ("-tb 4", "-tb is not a flag"),
    ("--served-model-name", "a value is needed"),
    ("-ngl x", "a whole number"), ("--no-jinja", "cannot be turned off"),
    ("--enable-metrics=false", "cannot be turned off"), ("-ctk q8_0", "--kv-cache-dtype"),
    ("--trust-remote-code", "leave it out")])
def test_values_of_peers_that_are_refused(line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(line.split())


@pytest.mark.parametrize("name", ["hf_overrides", "default_chat_template_kwargs"])
def test_what_must_be_an_object_is_one(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    for text in ("[1]", "x", "{", '"a"'):
        with pytest.raises(ConfigError, match="a JSON object is needed"):
            resolve(parse([flag, text]), probe())
    assert value(from_options("demo", {name: {"a": 1}}), f"model.{name}") == '{"a": 1}'


def test_layers_on_the_gpu_are_all_or_none() -> None:
    assert resolve(parse(["-ngl", "0"]), probe()).device.device == "cpu"
    with pytest.raises(ConfigError, match="0 layers on the GPU means --device cpu"):
        resolve(parse(["-ngl", "0", "--device", "cuda"]), probe())


# ---------------------------------------------------------------- did you mean
@pytest.mark.parametrize(("typed", "proposed"), [
    ("--disable-radix-cach", "--disable-radix-cache"), ("--max-model-length", "--max-model-len"),
    ("--enable-hisparce", "--enable-hisparse"), ("--tensor-parallel-sizes", "--tensor-parallel-size"),
    ("--enable-radix-cache", "--enable-prefix-caching"), ("--no-enforce-eager", None),
    ("--disable-prefix-caching", "--no-enable-prefix-caching"), ("--enable-overlap-schedule", None),
    ("--disable-hisparse", None), ("--trust-remote-codes", None),
    ("--enable-loras", None), ("--compilation-configs", None), ("--dry-run", None), ("--zzz", None),
    ("--quantisation", "--quantization")])
def test_only_what_is_taken_is_proposed(typed: str, proposed: str | None) -> None:
    with pytest.raises(ConfigError, match=f"{typed} is not a flag") as e:
        parse([typed])
    assert str(e.value).endswith(f"did you mean {proposed}?" if proposed else "see penstock serve --help")


def test_no_refused_spelling_is_ever_proposed() -> None:
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    ours = {s for f in flags() for s in f.spellings}
    refused = {f for entry in UNBUILT for f in entry.flags if f.startswith("--") and f[-1] != "*"} - ours
    assert len(refused) > 100
    for flag in refused:
        with pytest.raises(ConfigError) as e:
            parser.parse(["demo", f"{flag}q"])
        assert f"did you mean {flag}?" not in str(e.value)


# ---------------------------------------------------------------- --config
def of_file(tmp_path: Path, text: str, *words: str) -> Config:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    file = FromFile([*words, "--config", str(path)])
    parser = Parser(prog="penstock serve")
    add_flags(parser)
    with file.blaming():
        args = parser.parse(prepare(file.words))
        args.model = args.model or file.model
        return resolve(config_from(args), probe())


def test_flags_of_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    text = """
model: org/name            # a comment
max_model_len: 4096
dram-bytes: 1e9
page-size: 8
sparse-kv: off
enable-prefix-caching: false
disable-overlap-schedule: true
rope-scaling: {"rope_type": "yarn", "factor": 4.0}
hf-overrides:
  rope_theta: 1000000.0
backends: [linear=reference, layer=reference]
t: 2
served-model-name: "yes"
tensor-parallel-size: 1
seed: null
"""
    found = of_file(tmp_path, text)
    assert found.model.model == "org/name" and found.model.max_model_len == 4096
    assert found.kv.host_bytes == 10**9 and found.kv.host_decode == "off" and not found.kv.prefix_cache
    assert not found.schedule.async_scheduling and found.device.threads == 2
    assert json.loads(found.model.hf_overrides or "") == {
        "rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert found.device.backends == ("linear=reference", "layer=reference")
    won = of_file(tmp_path, text, "demo", "--context-length", "64", "--backends", "linear=packed",
                  "--threads=1", "--prefix-cache", "--block-size=4")
    assert won.model.model == "demo" and won.model.max_model_len == 64 and won.kv.page_size == 4
    assert won.device.backends == ("linear=packed",) and won.device.threads == 1 and won.kv.prefix_cache
    assert of_file(tmp_path, "", "demo").model.model == "demo"


@pytest.mark.parametrize(("text", "key", "said"), [
    ("page-size: 1000", "page-size", "1 to 256"), ("page_size: many", "page_size", "a whole number"),
    ("pagesize: 8", "pagesize", "did you mean --page-size"), ("enable-lora: true", "enable-lora", "LoRA"),
    ("config: other.yaml", "config", "no other file"), ("api-key: ' '", "api-key", "is empty"),
    ("hbm-bytes: 3Q", "hbm-bytes", "is not a size"), ("hf-overrides: [1, {}]", "hf-overrides", "JSON object"),
    ("kv-cache-memory-bytes: x", "kv-cache-memory-bytes", "not a size"),
    ("block-size: 8\npage-size: 8", "page-size", "there twice"),
    ("hf-overrides: {a: 2020-01-01}", "hf-overrides", "JSON has no such value"),
    ("page-size: 8: 9", "", "not YAML"), ("- 1", "", "without dashes"), ("just text", "", "without dashes")])
def test_errors_of_a_file_name_it_and_the_key(tmp_path: Path, text: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError) as e:
        of_file(tmp_path, text, "demo")
    assert str(e.value).startswith(f"--config {tmp_path}/f.yaml: {key}{':' * bool(key)}")
    assert said in str(e.value)


def test_config_of_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("model: demo\npage_size: 4\nport: 0\n")
    assert main(["serve", "--config", str(path), "--print-config"]) == 0
    assert "page_size 4" in capsys.readouterr().out
    for words, said in ((["serve", "--config", "/absent"], "cannot be read"),
                        (["serve", "--config"], "a YAML file"),
                        (["serve", f"--config={path}", f"--config={path}"], "twice"),
                        (["generate", "--config", str(path)], "port: --port is a flag of penstock serve")):
        assert main(words) == 2
        assert said in capsys.readouterr().err
