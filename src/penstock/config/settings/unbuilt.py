"""Spellings that users of SGLang and vLLM type for what penstock does not have (yet).

A value that asks for what happens anyway is accepted; everything else is refused, naming the
feature. Nothing is accepted and ignored. The list is generated into docs/flags.md, and it shrinks.
"""
from __future__ import annotations

from dataclasses import dataclass

from penstock.config.base.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbuilt:
    """`flags` may end in `*`. `neutral` values are accepted; `switch` flags take no value."""

    flags: tuple[str, ...]
    feature: str                        # "pipeline parallelism": "... is not built yet"
    neutral: tuple[str, ...] = ()
    switch: bool = False
    instead: str = ""                   # what to type, or why; alone when `feature` is empty

    def check(self, name: str, value: str | None) -> None:
        """Raises ConfigError unless `value` asks for what happens anyway."""
        if self.switch:
            negated = name.startswith("--no-") and name not in self.flags
            if negated or (value or "").lower() in ("false", "0"):
                return
            given, accepted = name, ""
        else:
            if value is not None and value.lower() in self.neutral:
                return
            given = name if value is None else f"{name} {value}"
            values = " or ".join(v for v in self.neutral if v not in _NONE)
            accepted = f"; only {values} is accepted" if values else ""
        if not self.feature:
            raise ConfigError(f"{given}: {self.instead}")
        tail = f" ({self.instead})" if self.instead else ""
        raise ConfigError(f"{given}: {self.feature} is not built yet{accepted}{tail}")


_NONE = ("none", "null", "")
_LORA = "LoRA"
_DRAFTS = "speculation by a model that drafts"


def _switch(feature: str, *flags: str, instead: str = "") -> Unbuilt:
    return Unbuilt(flags=flags, feature=feature, switch=True, instead=instead)


def _value(feature: str, *flags: str, neutral: tuple[str, ...] = (), instead: str = "") -> Unbuilt:
    return Unbuilt(flags=flags, feature=feature, neutral=neutral, instead=instead)


UNBUILT: tuple[Unbuilt, ...] = (
    # Several devices.
    _switch("data-parallel attention", "--enable-dp-attention"),
    _value("", "--distributed-executor-backend", neutral=("mp",),
           instead="ranks are processes of ours; for several machines give --nnodes, --node-rank and "
                   "--dist-init-addr"),
    _value("", "--master-addr", "--master-port", "--nccl-port",
           instead="give both in one, with --dist-init-addr HOST:PORT"),
    _value("another device than a CPU or an NVIDIA GPU", "--device", neutral=("auto", "cpu", "cuda")),
    _value("the choice of a GPU", "--base-gpu-id", neutral=("0",)),
    # The tiers and attention.
    _value("", "--disk-bytes", "--swap-space", neutral=("0", "0.0"),
           instead="for copies in host memory use --dram-bytes SIZE, for files --kv-storage file:///DIR"),
    _value("", "--disk-path", neutral=_NONE,
           instead="pages are stored with --kv-storage file:///DIR, s3://BUCKET/PREFIX or valkey://HOST:PORT"),
    _value("", "--kv-offloading-backend", neutral=("native", *_NONE),
           instead="only native is accepted: the host tier is built in"),
    _value("", "--hicache-write-policy", neutral=("write_through", "write_through_selective"),
           instead="only write_through and write_through_selective are accepted: a page is copied to the "
                   "host when it is sealed, so that giving up its device page never waits for a copy"),
    _value("", "--hicache-io-backend", "--hicache-mem-layout",
           instead="there is one layout and one way to copy: a page is one block in every tier"),
    _value("", "--disaggregation-bootstrap-port", neutral=_NONE,
           instead="the ends meet at one address: give the prefill end --pair-listen HOST:PORT and the "
                   "decode end --pair-peer HOST:PORT"),
    _value("", "--kv-transfer-config", neutral=_NONE,
           instead="for a pair give --disaggregation-mode prefill or decode, with --pair-listen or "
                   "--pair-peer"),
    _value("other settings of a pair", "--disaggregation-decode-*", "--disaggregation-prefill-*",
           "--disaggregation-ib-*", neutral=_NONE),
    _value("publishing KV events", "--kv-events-config", neutral=_NONE),
    _value("a KV cache of another type", "--kv-cache-dtype",
           neutral=("auto", "bfloat16", "fp8_e4m3", "fp8")),
    _value("", "--attention-backend", "--sampling-backend", "--prefill-attention-backend",
           "--decode-attention-backend", neutral=_NONE,
           instead="choose ours with --backends OP=NAME; `penstock doctor` lists them"),
    _value("", "--num-gpu-blocks-override", "--max-total-tokens",
           instead="the pool is set in bytes, with --hbm-bytes SIZE"),
    # Weights.
    _value("float16", "--dtype", neutral=("auto", "float32", "bfloat16", "gguf")),
    _value("", "--load-format", neutral=("auto", "safetensors", "gguf", "dummy"),
           instead="choose from auto, safetensors, gguf, dummy; pickled checkpoints (.bin, .pt) "
                   "are refused, because loading them runs code"),
    _value("quantised compute", "--quantization", neutral=_NONE,
           instead="a checkpoint says itself what it is; GGUF and fp8 weights are dequantised when they are "
                   "loaded, fp8 ones on a GPU when they are used; --dtype gguf keeps those of a GGUF packed"),
    _value("offloading weights", "--cpu-offload-gb", neutral=("0", "0.0")),
    _value("another hub revision", "--revision", "--tokenizer-revision", neutral=("main", *_NONE)),
    _value("another tokenizer mode", "--tokenizer-mode", neutral=("auto",)),
    _switch("", "--trust-remote-code",
            instead="refused for security: code in a model folder could do anything here; "
                    "only built-in model families run"),
    _switch("", "--skip-tokenizer-init",
            instead="a folder without a tokenizer serves token-id prompts without a flag"),
    # Adapters, speculation, structure.
    _switch(_LORA, "--enable-lora"),
    _value(_LORA, "--lora-*", "--max-lora*", neutral=_NONE),
    _value(_DRAFTS, "--speculative-draft-model-revision", "--speculative-draft-model-quantization",
           "--speculative-draft-load-format", "--speculative-draft-attention-backend",
           "--speculative-draft-window-size", "--speculative-token-map", neutral=_NONE,
           instead="--speculative-method ngram is there, mtp and eagle3"),
    _value("", "--speculative-ngram-*", "--speculative-attention-mode", "--speculative-accept-*",
           neutral=_NONE,
           instead="give --speculative-method ngram, with --speculative-tokens, --prompt-lookup-min and "
                   "--prompt-lookup-max; a draft is kept while it is what would be said without"),
    _value("a parser of calls from a file", "--tool-parser-plugin", neutral=_NONE,
           instead="choose with --tool-call-parser"),
    _value("", "--grammar-backend", "--guided-decoding-backend", neutral=("auto", "llguidance", "none"),
           instead="choose from auto, llguidance, none"),
    _value("", "--structured-outputs-config", neutral=_NONE, instead="choose with --grammar-backend"),
    _value("images and other media", "--limit-mm-per-prompt", "--mm-*", neutral=_NONE),
    _switch("images and other media", "--enable-multimodal"),
    # The step.
    _value("another schedule policy", "--schedule-policy", "--scheduling-policy",
           neutral=("fcfs",)),
    _switch("torch.compile", "--enable-torch-compile"),
    _value("the choice of what is captured in CUDA graphs", "--cuda-graph-*", "--compilation-config",
           neutral=("0", *_NONE)),
    # The server.
    _value("certificates of clients, and other settings of TLS", "--ssl-ca-certs", "--ssl-cert-reqs",
           "--ssl-ciphers", "--ssl-keyfile-password", neutral=_NONE,
           instead="--ssl-certfile and --ssl-keyfile are there"),
    _value("more than one API process", "--api-server-count", "--tokenizer-worker-num",
           neutral=("1",)),
    _value("another root path", "--root-path", neutral=_NONE),
    _value("", "--allowed-*", neutral=_NONE, instead="say which pages may ask with --cors-origins"),
    _switch("", "--log-requests", "--enable-log-requests", instead="prompts are never logged"),
)

# Switches of the peers that ask for what penstock always does.
ALWAYS = {
    "--enable-auto-tool-choice": "a request's tool_choice may always be auto",
    "--enable-mixed-chunk": "prefill and decode share every step",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-metrics": "/metrics is always there",
    "--disable-log-requests": "prompts are never logged",
    "--enable-cache-report": "usage always reports cached tokens",
}


def find_unbuilt(name: str) -> Unbuilt | None:
    """The entry for a spelling: exact first, then the longest pattern."""
    positive = "--" + name[5:] if name.startswith("--no-") else name
    if positive != name and positive in ALWAYS:
        return _switch("", name, instead=f"cannot be turned off: {ALWAYS[positive]}")
    exact = [e for e in UNBUILT if name in e.flags or (e.switch and positive in e.flags)]
    if exact:
        return exact[0]
    patterns = [(len(f), e) for e in UNBUILT for f in e.flags
                if f.endswith("*") and name.startswith(f[:-1])]
    return max(patterns, key=lambda p: p[0])[1] if patterns else None


def unbuilt_spellings() -> list[str]:
    return [f for e in UNBUILT for f in e.flags if f.startswith("--") and not f.endswith("*")]
