"""Spellings that users of SGLang, vLLM and llama.cpp type for what penstock does not have (yet).

A value that asks for what happens anyway is accepted; everything else is refused, naming the
feature. Nothing is accepted and ignored. docs/reference/flags.md has the names, and the list shrinks.
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
    _value("", "--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr",
           "--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa",
           "--data-parallel-rpc-port", "-dpp", "--data-parallel-backend", neutral=_NONE,
           instead="one `penstock serve` starts all engines of this machine: give --dp N alone"),
    _switch("", "--data-parallel-hybrid-lb", "--data-parallel-external-lb",
            instead="one `penstock serve` starts all engines of this machine: give --dp N alone"),
    _switch("", "--headless", instead="give --nnodes, --node-rank and --dist-init-addr on each machine: only "
                                      "node 0 has the HTTP address"),
    _value("decode context parallelism", "--decode-context-parallel-size", "-dcp", "--prefill-context-*",
           "--dcp-size", "--attn-cp-size", neutral=("1",)),
    _value("", "--load-balance-method", neutral=("auto", *_NONE),
           instead="leave it out: a prompt goes to the engine that has its prefix, else to the least loaded one"),
    _value("", "--tensor-split", "-ts", "--split-mode", "-sm", "--main-gpu", "-mg",
           neutral=("0", "layer", *_NONE), instead="split a model with --pp N (layers) or --tp N (heads)"),
    _value("another device than a CPU or an NVIDIA GPU", "--device", neutral=("auto", "cpu", "cuda")),
    _value("the choice of a GPU", "--base-gpu-id", neutral=("0",)),
    # The tiers and attention.
    _value("", "--disk-bytes", "--swap-space", neutral=("0", "0.0"),
           instead="for copies in host memory use --kv-offloading-size SIZE, for files --kv-storage file:///DIR"),
    _value("", "--disk-path", neutral=_NONE,
           instead="pages are stored with --kv-storage file:///DIR, s3://BUCKET/PREFIX or valkey://HOST:PORT"),
    _value("", "--kv-offloading-backend", neutral=("native", *_NONE),
           instead="only native is accepted: the host tier is built in"),
    _value("", "--hicache-write-policy", neutral=("write_through", "write_through_selective", "none"),
           instead="only write_through and write_through_selective are accepted: a page is copied to the "
                   "host when it is full, so that giving up its device page never waits for a copy"),
    _value("", "--kv-storage-write-rate", instead="pages are stored as fast as the storage takes them, after reads: "
           "give the folder to a device with room, or store less with --kv-storage-write-policy"),
    _switch("", "--kv-storage-sync", instead="leave it out: a checksum finds pages that a power loss took"),
    _value("", "--hicache-io-backend", "--hicache-mem-layout",
           instead="there is one layout and one way to copy: a page is one block in every tier"),
    _value("", "--num-reserved-decode-tokens", neutral=_NONE,
           instead="leave it out: a request is admitted with memory for its whole max_tokens"),
    _value("RDMA between prefill and decode instances", "--disaggregation-ib-device", neutral=_NONE,
           instead="KV between instances goes over TCP: leave it out"),
    _value("", "--disaggregation-bootstrap-port", neutral=_NONE,
           instead="both instances name one address: give the prefill instance "
                   "--disaggregation-listen HOST:PORT and the "
                   "decode instance --disaggregation-connect HOST:PORT"),
    _value("", "--kv-transfer-config", neutral=_NONE,
           instead="give --disaggregation-mode prefill or decode, with --disaggregation-listen or "
                   "--disaggregation-connect"),
    _value("other settings of disaggregation", "--disaggregation-decode-*", "--disaggregation-prefill-*",
           "--disaggregation-ib-*", neutral=_NONE),
    _value("a KV cache in another type than bfloat16 or fp8 (e4m3)", "--kv-cache-dtype",
           neutral=("auto", "bfloat16", "fp8_e4m3", "fp8")),
    _value("", "--attention-backend", "--sampling-backend", "--prefill-attention-backend",
           "--decode-attention-backend", "--nsa-*", "--dsa-*", "--moe-runner-backend", "--moe-a2a-backend",
           "--moe-backend", "--fp8-gemm-backend", "--linear-backend", "--mamba-backend",
           "--linear-attn-backend", neutral=("auto", *_NONE),
           instead="choose ours with --backends OP=NAME; `penstock doctor` lists them"),
    _value("", "--num-gpu-blocks-override", "--max-total-tokens",
           instead="the pool is set in bytes, with --kv-cache-memory-bytes SIZE"),
    _value("", "--swa-full-tokens-ratio", neutral=_NONE,
           instead="leave it out: all layers, with a window or without, take what they need of one pool"),
    _switch("", "--disable-hybrid-kv-cache-manager", "--disable-hybrid-swa-memory",
            instead="leave it out: pages that left a layer's window are always freed"),
    _value("states of another type", "--mamba-cache-dtype", "--mamba-ssm-cache-dtype", "--mamba-ssm-dtype",
           neutral=("auto", "float32"), instead="states are kept in float32"),
    _value("", "--mamba-cache-mode", "--mamba-block-size", neutral=("auto", *_NONE),
           instead="states for later prompts are kept each --state-interval tokens"),
    _value("", "--flash-attn", "-fa", neutral=("auto", "on", "1"),
           instead="attention always runs in blocks: leave it out"),
    _value("", "--cache-type-k", "--cache-type-v", "-ctk", "-ctv",
           instead="the type of KV is chosen with --kv-cache-dtype"),
    _value("", "--cache-ram", "-cram", neutral=("0",),
           instead="for copies in host memory use --kv-offloading-size SIZE"),
    # Weights.
    _value("float16", "--dtype", neutral=("auto", "float32", "bfloat16", "gguf")),
    _value("", "--load-format", neutral=("auto", "safetensors", "gguf", "dummy"),
           instead="choose from auto, safetensors, gguf, dummy; pickled checkpoints (.bin, .pt) "
                   "are refused, because loading them runs code"),
    _value("offloading weights", "--cpu-offload-gb", "--n-cpu-moe", "-ncmoe", neutral=("0", "0.0")),
    _value("offloading weights", "--override-tensor", "-ot", "--offload-backend", neutral=_NONE),
    _switch("offloading weights", "--cpu-moe", "-cmoe"),
    _switch("", "--mlock", instead="leave it out: weights are read into memory, not mapped, and swap "
                                   "is the machine's setting"),
    _value("", "--model-loader-extra-config", neutral=("{}", *_NONE),
           instead="leave it out: files are read ahead in threads without settings"),
    _value("", "--model-impl", neutral=("auto", *_NONE),
           instead="only penstock's own implementations run: leave it out"),
    _value("another task than text generation", "--task", "--runner", "--convert",
           neutral=("generate", "auto", *_NONE)),
    _switch("another task than text generation", "--is-embedding", "--embedding", "--embeddings",
            "--reranking"),
    _value("another revision of a tokenizer", "--tokenizer-revision", "--code-revision",
           neutral=("main", *_NONE)),
    _value("", "--rope-theta", "--rope-freq-base", neutral=("0",),
           instead="""give --hf-overrides '{"rope_theta": X}'"""),
    _value("", "--rope-freq-scale", instead="""give --rope-scaling '{"rope_type": "linear", "factor": X}'"""),
    _value("", "--yarn-*", instead="give all of YaRN in one, with --rope-scaling JSON"),
    _value("another tokenizer mode", "--tokenizer-mode", neutral=("auto",)),
    _switch("", "--trust-remote-code",
            instead="refused for security: code in a model folder could do anything here, and none is ever "
                    "run: leave it out, built-in model families need no trust"),
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
                   "--prompt-lookup-max; drafts never change the output"),
    _value("a parser of calls from a file", "--tool-parser-plugin", neutral=_NONE,
           instead="choose with --tool-call-parser"),
    _value("", "--grammar-backend", "--guided-decoding-backend", neutral=("auto", "llguidance", "none"),
           instead="choose from auto, llguidance, none"),
    _value("", "--structured-outputs-config", neutral=_NONE, instead="choose with --grammar-backend"),
    _value("images and other media", "--limit-mm-per-prompt", "--mm-*", neutral=_NONE),
    _switch("images and other media", "--enable-multimodal"),
    _value("images and other media", "--mmproj", "-mm", neutral=_NONE),
    _value("", "--max-logprobs", neutral=("20", *_NONE),
           instead="leave it out: a request may ask for up to 20 logprobs of each token"),
    # The step.
    _value("another schedule policy", "--schedule-policy", "--scheduling-policy",
           neutral=("fcfs",)),
    _switch("", "--enable-priority-scheduling",
            instead="a request's priority always counts, and the lower number goes first, as in vLLM: leave "
                    "it out"),
    _value("", "--schedule-conservativeness", neutral=("1", "1.0", *_NONE),
           instead="leave it out: a request is admitted with memory for its whole max_tokens"),
    _value("", "--max-num-partial-prefills", "--max-long-partial-prefills", neutral=("1",),
           instead="leave it out: a step takes prompts in their order until its --max-num-batched-tokens are full"),
    _value("", "--long-prefill-token-threshold", neutral=("0",),
           instead="leave it out: a step takes prompts in their order until its --max-num-batched-tokens are full"),
    _value("", "--max-prefill-tokens", "--ubatch-size", "-ub", "--max-prefill-bs", neutral=_NONE,
           instead="the tokens of one step are set with --max-num-batched-tokens N"),
    _value("", "--stream-interval", "--num-scheduler-steps", "--num-continuous-decode-steps",
           neutral=("1",), instead="leave it out: each token is sent when its step has ended"),
    _switch("torch.compile", "--enable-torch-compile"),
    _value("the choice of what is captured in CUDA graphs", "--cuda-graph-*", "--compilation-config", "-O*",
           "--cudagraph-*", "--max-cudagraph-capture-size", neutral=("0", *_NONE),
           instead="decode steps of up to --max-num-seqs requests are captured; --enforce-eager: none"),
    _switch("the choice of what is captured in CUDA graphs", "--disable-cuda-graph-padding",
            "--enable-piecewise-cuda-graph",
            instead="decode steps of up to --max-num-seqs requests are captured; --enforce-eager: none"),
    _switch("", "--skip-server-warmup", "--no-warmup",
            instead="leave it out: the engine always makes one token before it is ready"),
    # The server.
    _value("certificates of clients, and other settings of TLS", "--ssl-ca-certs", "--ssl-cert-reqs",
           "--ssl-ciphers", "--ssl-keyfile-password", neutral=_NONE,
           instead="--ssl-certfile and --ssl-keyfile are there"),
    _value("more than one API process", "--api-server-count", "--tokenizer-worker-num",
           neutral=("1",)),
    _value("another root path", "--root-path", neutral=_NONE),
    _value("", "--allowed-methods", "--allowed-headers", neutral=('["*"]', *_NONE),
           instead="all of them are allowed: leave it out, and name the web origins with --cors-origins"),
    _switch("", "--allow-credentials", instead="keys come in a header, no cookie is read: leave it out"),
    _switch("an id of each request in a header", "--enable-request-id-headers",
            instead="each answer has one in its body, as id"),
    _value("", "--collect-detailed-traces", neutral=_NONE,
           instead="--otlp-traces-endpoint has the phases of each request"),
    _switch("", "--enable-trace", instead="--otlp-traces-endpoint switches traces on"),
    _value("", "--h11-*", instead="leave it out: a request's head may have 16 KiB, a body --body-bytes-max"),
    _switch("sleep and wake-up", "--enable-sleep-mode", "--enable-memory-saver"),
    _value("", "--slot-save-path", neutral=_NONE, instead="pages are stored with --kv-storage file:///DIR"),
    _switch("", "--log-requests", "--enable-log-requests", instead="prompts are never logged"),
)

# Switches of the peers that ask for what penstock always does.
ALWAYS = {
    "--enable-auto-tool-choice": "a request's tool_choice may always be auto",
    "--enable-mixed-chunk": "prefill and decode share every step",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-metrics": "/metrics is always there",
    "--schedule-low-priority-values-first": "of two priorities the lower number goes first",
    "--disable-log-requests": "prompts are never logged",
    "--no-mmap": "weights are read into memory, not mapped",
    "--weight-loader-disable-mmap": "weights are read into memory, not mapped",
    "--language-model-only": "models are served as text models",
    "--jinja": "chats always go through the model's Jinja template",
    "-cb": "requests always join and leave the running batch",
    "--cont-batching": "requests always join and leave the running batch",
    "--enable-prompt-tokens-details": "usage always reports cached tokens",
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
