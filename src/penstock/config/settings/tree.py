"""The frozen config tree: every knob, its unit, its default. Owns no behaviour.

`None` means "decided once at start" (`resolve`); nothing mutates it later. The `Annotated` text is
the help of the generated flag; `Alias` holds the spellings that users of the peers already type.
`refuse.py` lists what does not work together.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args, get_type_hints

from penstock.config.base.sizes import parse_bytes


class Alias:
    """Other spellings of a flag, with their dashes."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Bytes:
    """Marks an int that is a size: the command line takes 512M, 4GiB, 1e9 or a plain number."""


class HostSize:
    """Marks a size in host memory: auto, a size (a plain number is GiB), or a multiple of the KV cache on the
    device, such as 2x."""


class Inverse:
    """Spellings of a switch that turn it off, with their dashes."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Unlisted:
    """Values that are taken and that help does not list."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Secret:
    """Marks a value that is never printed, logged or sent to another process."""


Dtype = Literal["auto", "float32", "bfloat16", "gguf"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Quantization = Literal["auto", "fp8", "mxfp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "auto-round",
                       "modelopt", "mxfp4", "gguf"]
HostDecode = Literal["auto", "always", "off"]
ToolCallParser = Literal["auto", "none", "deepseek_v3", "deepseek_v31", "deepseek_v32", "gemma4", "glm", "gpt_oss",
                         "hermes", "kimi_k2", "llama3_json", "minimax_m2", "minimax_m3", "mistral", "qwen3_coder",
                         "seed_oss"]
ReasoningParser = Literal["auto", "none", "think", "gemma4", "gpt_oss", "kimi_vl", "minimax_m2_append_think",
                          "minimax_m3", "mistral", "seed_oss"]
GrammarBackend = Literal["auto", "llguidance", "none"]
DECODE_INSTANCES_MAX = 8        # of one prefill instance
PREFILL_INSTANCES_MAX = 8       # that a router names to one decode instance
KV_TIMEOUT_S, BOOTSTRAP_TIMEOUT_S = 300.0, 30.0
LogFormat = Literal["text", "json"]
HttpLogLevel = Literal["debug", "info", "warning", "error", "critical"]
PairMode = Literal["prefill", "decode"]
TransferBackend = Literal["stream", "nixl", "mooncake"]
PairFallback = Literal["compute", "refuse"]
SpeculativeMethod = Literal["ngram", "mtp", "eagle3"]
RouterDialect = Literal["off", "sglang", "vllm"]
MetricsDialect = Literal["sglang", "vllm"]
StoragePolicy = Literal["timeout", "wait_complete", "best_effort"]
Kept = Literal["auto", "bfloat16", "fp8_e4m3", "fp8"]
StorageWrites = Literal["write_through", "write_through_selective", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: Annotated[str, "folder, .gguf file, hub id, or 'demo'"]
    tokenizer: Annotated[str | None, "folder or file of the tokenizer (default: the model's own)",
                         Alias("--tokenizer-path")] = None
    served_model_name: Annotated[tuple[str, ...], "model names in the HTTP API; a response has the requested name, "
                                 "or without one the first (default: the model's)"] = ()
    dtype: Annotated[Dtype, "compute and KV type. auto: float32 on a CPU; on a GPU the checkpoint's (GGUF, float16: "
                     "bfloat16). gguf: weights stay packed"] = "auto"
    load_format: Annotated[LoadFormat, "file format of the weights; dummy makes random weights from "
                           "config.json"] = "auto"
    quantization: Annotated[Quantization, "not needed: the format of the checkpoint's weights is detected. Another "
                            "value is refused, as weights are not quantised at load", Alias("-q")] = "auto"
    max_model_len: Annotated[int | None, "context length: tokens of prompt and output; refused at start if one such "
                             "request does not fit (default: the model's, or what fits)",
                             Alias("--context-length", "--ctx-size", "-c")] = None
    revision: Annotated[str | None, "branch, tag or commit of a hub id (default: main)"] = None
    download_dir: Annotated[str | None, "folder for downloads from the hub (default: $HF_HUB_CACHE, else the "
                            "cache of Hugging Face's tools)"] = None
    hf_overrides: Annotated[str | None, "JSON object: fields that replace those of config.json; for longer "
                            "contexts also as --rope-scaling JSON, the rope_scaling alone",
                            Alias("--json-model-override-args")] = None
    generation_config: Annotated[str, "sampling defaults. auto: the model's generation_config.json; none or vllm: "
                                 "temperature 1, top_p 1; or a folder with such a file"] = "auto"
    override_generation_config: Annotated[
        str | None, "JSON object: temperature, top_k, top_p, min_p, repetition_penalty that replace the "
        "model's"] = None
    chat_template: Annotated[str | None, "Jinja template file that replaces the model's"] = None
    default_chat_template_kwargs: Annotated[
        str | None, "JSON object: default variables of the chat template; a request's chat_template_kwargs "
        "override them", Alias("--chat-template-kwargs")] = None
    tool_call_parser: Annotated[ToolCallParser, "format of the model's tool calls; names of vLLM and SGLang work "
                                "too; auto detects it from the chat template"] = "auto"
    reasoning_parser: Annotated[ReasoningParser, "format of reasoning. auto: by the chat template; think: <think>. "
                                "Names of vLLM and SGLang work too",
                                Unlisted("gemma4", "kimi_vl")] = "auto"
    grammar_backend: Annotated[GrammarBackend, "library for structured output (JSON schema, regex, grammar); none: "
                               "such a request is a 400; auto: llguidance if installed",
                               Alias("--guided-decoding-backend")] = "auto"
    seed: Annotated[int | None, "seed of requests that give none, and of dummy weights (default: random)",
                    Alias("--random-seed")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    page_size: Annotated[int | None, "tokens per KV page: 1 to 256 (default: 16, or a block of a model that selects "
                         "larger ones)", Alias("--block-size")] = None
    state_interval: Annotated[int | None, "recurrent models: tokens between cached states, a multiple of --page-size "
                              "(default: KV of a quarter of a state's bytes, in 64s, at least 128)"] = None
    window_interval: Annotated[int, "sliding windows: tokens from one that the prefix cache keeps to the next; those "
                               "at prompts' ends and forks stay too. 0: all stay"] = 0
    kv_cache_memory_bytes: Annotated[int | None, "GPU memory for KV, per rank; without a GPU, CPU memory "
                                     "instead (default: measured at start; see --gpu-memory-utilization)",
                                     Bytes()] = None
    gpu_memory_utilization: Annotated[float | None, "share of the GPU's memory for weights, activations and KV "
                                      "(default: 0.9). On a CPU: share of the free memory for KV (default: 0.3)",
                                      Alias("--mem-fraction-static")] = None
    kv_offloading_size: Annotated[str | None, "CPU memory for KV per engine: N (GiB), SIZE, 2x the GPU's, auto (half "
                                  "of what is free), 0 (default: auto if decode selects, or for storage)",
                                  HostSize()] = None
    host_decode: Annotated[HostDecode | None, "indexers, --sparse-top-k: decode from host memory. auto: when the "
                           "GPU's KV cache is full; always; off (default: auto; others decode on the GPU)"] = None
    sparse_top_k: Annotated[int | None, "sparse decode of GQA models: tokens that each KV head reads per step. A "
                            "request's sparse_top_k lowers it (default: off; indexers select anyway)"] = None
    sparse_block_size: Annotated[int, "tokens that are selected together: 4 to 16, a divisor of --page-size"] = 8
    sparse_dense_layers: Annotated[tuple[str, ...], "layers that do not select: they read all of their KV, which stays "
                                   "on the GPU, e.g. 0,1"] = ()
    hot_buffer_tokens: Annotated[int | None, "largest hot buffer: tokens that the GPU caches of a request in host "
                                 "memory, in its KV pages (default: 4 times one step's selection)"] = None
    prefix_cache: Annotated[bool, "reuse the KV of earlier prompts and answers, but not of answers with "
                            "--sparse-top-k: the next chat turn prefills those again",
                            Alias("--enable-prefix-caching"), Inverse("--disable-radix-cache")] = True
    kv_storage: Annotated[str | None, "KV that outlives the engine: file:///DIR, s3://BUCKET/PREFIX (AWS_* "
                          "variables), valkey://HOST:PORT, valkey:///SOCKET, mooncake://MASTER:PORT"] = None
    kv_storage_bytes: Annotated[int | None, "maximum size of a storage folder, over all engines (default: four fifths "
                                "of the free space at start); servers and buckets have their own", Bytes()] = None
    kv_storage_key: Annotated[str | None, "file with a secret, 16 characters or more: engines with another find no "
                              "pages (default: one in the folder; for servers, of this user and machine)"] = None
    kv_storage_policy: Annotated[StoragePolicy, "wait for stored pages. timeout: while reading beats computing; "
                                 "wait_complete: for all; best_effort: until it can run",
                                 Alias("--hicache-storage-prefetch-policy")] = "timeout"
    kv_storage_write_policy: Annotated[StorageWrites, "pages to store. write_through: all; write_through_selective: "
                                       "prefixes used twice; none: read only",
                                       Alias("--hicache-write-policy")] = "write_through"
    retained_share: Annotated[float, "share of the host tier, else of the GPU's KV, that sessions may retain "
                              "(session_retain_s): evicted last. 0: none may"] = 0.0
    kv_events_config: Annotated[str | None, "publish cached pages to routers over ZMQ, by default on this machine: "
                                "vLLM's JSON, e.g. {\"enable_kv_cache_events\": true}; needs '.[events]'"] = None
    kv_cache_dtype: Annotated[Kept, "type of KV: auto is the compute type, or if bfloat16 what the "
                              "checkpoint asks for; fp8: e4m3, a scale per 128 values"] = "auto"
    sparse_metadata_dtype: Annotated[Kept, "type of indexer keys (auto: as --kv-cache-dtype) or of key min/max "
                                     "per block (--sparse-top-k; auto: the compute type)"] = "auto"

    def page_tokens(self, block: int = 1) -> int:
        """--page-size, or the least from 16 tokens on that holds whole blocks."""
        return -(-16 // block) * block if self.page_size is None else self.page_size

    @property
    def is_readonly(self) -> bool:
        """Whether storage is read, and neither written nor deleted from."""
        return self.kv_storage_write_policy == "none"

    @property
    def host_bytes(self) -> int | None:
        """Bytes of KV in host memory, 0 for none; None: not said as a size."""
        size = self.kv_offloading_size
        return None if size is None or size == "auto" or size.endswith("x") else parse_bytes(size)

    @property
    def host_ratio(self) -> float | None:
        """The host tier as a multiple of the device's pool; None: not said so."""
        size = self.kv_offloading_size
        return float(size[:-1]) if size is not None and size.endswith("x") else None

    @property
    def host_tier(self) -> bool | None:
        """Whether there is a host tier; None: not said."""
        return None if self.kv_offloading_size is None else self.host_bytes != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    max_num_seqs: Annotated[int, "maximum number of requests that decode at once",
                            Alias("--max-running-requests", "--parallel", "-np")] = 16
    max_num_batched_tokens: Annotated[int | None, "token budget of one step, prefill and decode together (default: "
                                      "512; on a GPU 8192, or 1024 for models under 36 MiB a layer)",
                                      Alias("--chunked-prefill-size", "--batch-size", "-b")] = None
    async_scheduling: Annotated[bool, "plan step n+1 while step n runs",
                                Inverse("--disable-overlap-schedule")] = True
    speculative_method: Annotated[SpeculativeMethod | None, "speculative decoding, same output (sparse decode too). "
                                  "ngram: prompt lookup; mtp: MTP head; eagle3: --speculative-model (default: "
                                  "off)"] = None
    speculative_model: Annotated[str | None, "folder of the eagle3 draft layer",
                                 Alias("--speculative-draft-model-path")] = None
    speculative_tokens: Annotated[int, "maximum number of draft tokens per request and step",
                                  Alias("--num-speculative-tokens")] = 3
    prompt_lookup_min: Annotated[int, "ngram: shortest run of last tokens to look up"] = 2
    prompt_lookup_max: Annotated[int, "ngram: longest run of last tokens to look up"] = 4
    max_waiting: Annotated[int | None, "queued requests before a 503 (default: 4 times --max-num-seqs)",
                           Alias("--max-queued-requests")] = None

    @property
    def num_drafts(self) -> int:
        """Draft tokens of a request in a step, at most."""
        return self.speculative_tokens if self.speculative_method else 0

    @property
    def num_step_tokens(self) -> int:
        assert self.max_num_batched_tokens is not None, "an unresolved config"
        return self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    device: Annotated[Literal["auto", "cpu", "cuda"], "where the model runs; auto is the GPU if torch can use "
                      "one"] = "auto"
    gpu_layers: Annotated[int | None, "layers on the GPU: all of them, or 0 for the CPU (default: all, with a "
                          "GPU)", Alias("--n-gpu-layers", "-ngl")] = None
    cuda_graphs: Annotated[bool, "capture CUDA graphs of decode steps at start",
                           Inverse("--enforce-eager", "--disable-cuda-graph")] = True
    threads: Annotated[int | None, "CPU threads for the model (default: usable cores)",
                       Alias("-t")] = None
    debug_cpu_isa: Annotated[Literal["native", "avx2", "plain"], "largest CPU instruction set that kernels may "
                             "use, for measurements"] = "native"
    pp: Annotated[int, "pipeline parallelism: number of stages, each a process with layers of its own",
                  Alias("--pipeline-parallel-size", "--pp-size", "-pp")] = 1
    pp_layers: Annotated[tuple[str, ...], "layers of each pipeline stage, e.g. 10,12,8 (default: even)"] = ()
    pp_together: Annotated[int | None, "with --pp, up to so many requests decode in one step, stage by stage; more "
                           "take turns (default: 32 on the GPUs of one machine, else 1)"] = None
    tp: Annotated[int, "tensor parallelism: ranks (processes) of each stage, which split heads, MLP columns, "
                  "experts, vocabulary; MLA KV is on each",
                  Alias("--tensor-parallel-size", "--tp-size", "-tp")] = 1
    ep: Annotated[int, "expert parallelism: groups of experts over the TP ranks. 1: each rank has columns of all "
                  "experts; 0: as many groups as TP ranks",
                  Alias("--expert-parallel-size", "--ep-size", "-ep")] = 1
    dp: Annotated[int, "data parallelism: engines of pp x tp ranks each, at one address. A prompt goes to the one with "
                  "its prefix, else to the least loaded", Alias("--data-parallel-size", "--dp-size", "-dp")] = 1
    step_timeout_s: Annotated[float, "seconds after which a rank that still computes one step counts as hung",
                              Alias("--watchdog-timeout")] = 300.0
    backends: Annotated[tuple[str, ...], "kernel backends by operation, e.g. linear=reference "
                        "(`penstock doctor` lists them)"] = ()

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp

    @property
    def expert_ranges(self) -> int:
        return self.ep or self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: Annotated[str, "address to bind; one that other machines reach is refused without API keys"] = "127.0.0.1"
    port: Annotated[int, "TCP port; 0 takes a free one and prints it"] = 8000
    api_key: Annotated[str | None, "key that clients must send (default: none, all routes are open to this "
                       "machine); its users see it in the process list: prefer a file",
                       Secret()] = field(default=None, repr=False)
    api_key_file: Annotated[str | None, "file with one API key per line"] = None
    admin_key_file: Annotated[str | None, "file with keys, one per line, that may also read metrics and "
                              "server_info, and flush the cache"] = None
    admin_api_key: Annotated[str | None, "one admin key; other users of this machine see it in the process list "
                             "(default: the API key, if there is just one)", Secret()] = field(
                                 default=None, repr=False)
    ssl_certfile: Annotated[str | None, "PEM file with the server's certificate: serve HTTPS; reread on "
                            "SIGHUP"] = None
    ssl_keyfile: Annotated[str | None, "PEM file with the certificate's key (default: in --ssl-certfile)"] = None
    cors_origins: Annotated[tuple[str, ...], "web origins that may send requests from a browser, e.g. "
                            "https://chat.example.com; * allows all"] = ()
    clip_max_tokens: Annotated[bool, "shorten a max_tokens that exceeds the context, and report it as "
                               "clipped_max_tokens in usage; off: refuse it with a 400"] = False
    body_bytes_max: Annotated[int | None, "largest request body (default: 16 bytes per token of the context, at "
                              "least 4 MiB)", Bytes()] = None
    router_dialect: Annotated[RouterDialect, "protocol of a router in front; sglang also hides GET /version, by "
                              "which the router smg would take this server for vLLM"] = "off"
    metrics_dialect: Annotated[MetricsDialect | None, "export metrics under the names of vLLM or SGLang too, for "
                               "routers and dashboards that know those"] = None
    otlp_traces_endpoint: Annotated[str | None, "send a trace of each request to this OpenTelemetry collector by "
                                    "OTLP/HTTP, e.g. http://localhost:4318/v1/traces; needs '.[otel]'"] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "least severe messages that are "
                         "logged"] = "info"
    log_format: Annotated[LogFormat, "format of the log on stderr: text (with time and level unless on a "
                          "terminal), or json, one object per line"] = "text"
    log_stats_interval: Annotated[float, "seconds between two status lines while requests run; 0 for none",
                                  Alias("--decode-log-interval")] = 10.0
    access_log: Annotated[bool | None, "log each HTTP request; on with --log-level debug",
                          Inverse("--disable-uvicorn-access-log")] = None
    log_level_http: Annotated[HttpLogLevel | None, "log level of the HTTP server itself (default: warning)",
                              Alias("--uvicorn-log-level")] = None
    timeout_keep_alive: Annotated[int, "seconds that an idle connection stays open: more than in clients and proxies, "
                                  "which else may reuse a closed one"] = 65
    drain_s: Annotated[float, "seconds that SIGTERM gives running requests"] = 30.0
    drain_store_s: Annotated[float, "seconds that SIGTERM then gives an engine to write cached pages that wait for "
                             "--kv-storage"] = 20.0
    ready_needs_prefill: Annotated[bool, "decode instance that knows its prefill instances: /ready is 503 while "
                                   "none of them is connected"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    prefill_replicas: Annotated[int, "prefill instances on this machine, each of --pp times --tp ranks, on the GPUs "
                                "after the decode instances'; needs --decode-replicas"] = 0
    decode_replicas: Annotated[int, "decode instances on this machine, each of --pp times --tp ranks, which answer "
                               "requests; needs --prefill-replicas"] = 0
    disaggregation_mode: Annotated[PairMode | None, "role of this instance. decode answers HTTP requests and sends "
                                   "prompts to prefill instances; behind a router both answer HTTP"] = None
    disaggregation_connect: Annotated[tuple[str, ...], "decode: addresses of prefill instances, HOST:PORT, "
                                      "unix:PATH or unix:@NAME, separated by commas; the least loaded one "
                                      "prefills a prompt"] = ()
    disaggregation_listen: Annotated[str | None, "prefill: address to listen on for decode instances, HOST:PORT, "
                                     "unix:PATH or unix:@NAME"] = None
    disaggregation_transfer_backend: Annotated[
        TransferBackend, "KV transfer, equal on both. stream: their connection; nixl, mooncake: unencrypted reads of "
        "the prefill instance's memory"] = "stream"
    disaggregation_fallback: Annotated[PairFallback, "decode, if no prefill instance delivers: prefill locally, "
                                       "or refuse prompts with 503"] = "compute"
    disaggregation_timeout_s: Annotated[float | None, "seconds. decode: for a prompt's KV, before the "
                                        "fallback (default: 300); prefill, behind a router: for the decode instance "
                                        "(default: 30)"] = None
    disaggregation_allow: Annotated[tuple[str, ...], "decode: hosts that a router may name as prefill instances, "
                                    "separated by commas (default: any)"] = ()

    @property
    def kv_timeout_s(self) -> float:
        """Seconds that a decode instance waits for the KV of a prompt."""
        return KV_TIMEOUT_S if self.disaggregation_timeout_s is None else self.disaggregation_timeout_s

    @property
    def bootstrap_timeout_s(self) -> float:
        """Seconds that a prompt from a router waits for the decode instance that takes it."""
        return BOOTSTRAP_TIMEOUT_S if self.disaggregation_timeout_s is None else self.disaggregation_timeout_s

    @property
    def num_peers(self) -> int:
        """Remote instances that this one has a place for; 0 without disaggregation."""
        if self.disaggregation_mode == "decode":
            return len(self.disaggregation_connect) or PREFILL_INSTANCES_MAX
        return DECODE_INSTANCES_MAX if self.disaggregation_mode == "prefill" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig:
    nnodes: Annotated[int | None, "machines that share the ranks of this engine; each runs the same command "
                      "(default: 1, or $WORLD_SIZE under torchrun with one process per machine)"] = None
    node_rank: Annotated[int | None, "number of this machine; machine 0 has the HTTP address (default: 0, or "
                         "torchrun's $RANK)"] = None
    dist_init_addr: Annotated[str | None, "HOST:PORT where machine 0 listens; each further engine takes the next port "
                              "(default: torchrun's $MASTER_ADDR, port after $MASTER_PORT)"] = None

    @property
    def num(self) -> int:
        return self.nnodes or 1

    @property
    def rank(self) -> int:
        return self.node_rank or 0

    def of_engine(self, n: int) -> NodesConfig:
        """Return the settings of engine `n` of several: each meets its nodes at a port of its own, the next."""
        if self.dist_init_addr is None:
            return self
        host, _, port = self.dist_init_addr.rpartition(":")
        return replace(self, dist_init_addr=f"{host}:{int(port) + n}")


RANK_SILENCE_S, NODE_SILENCE_S, INSTANCE_SILENCE_S = 6.0, 5.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What holds between all processes and machines of a deployment: secret, TLS, heartbeats."""

    cluster_key_file: Annotated[str | None, "file with the secret (16 characters or more) of all nodes, or of prefill "
                                "and decode instances (default: $PENSTOCK_CLUSTER_KEY)"] = None
    cluster_tls: Annotated[bool, "decode instance: connect to prefill instances by TLS. Between machines it is "
                          "needed, or --cluster-insecure"] = False
    cluster_tls_cert: Annotated[str | None, "PEM file with a certificate and its key, for TLS between machines: on "
                                "the prefill instance and on all nodes. Needed there, or --cluster-insecure"] = None
    cluster_insecure: Annotated[bool, "allow connections between machines without TLS. Needed by stages that span "
                                "machines (NCCL, gloo), and by nixl and mooncake"] = False
    heartbeat_timeout_s: Annotated[float | None, "seconds without a heartbeat after which a rank, node or instance "
                                   "counts as dead (default: 6 for ranks, 5 for nodes, 10 for instances)"] = None

    @property
    def rank_silence_s(self) -> float:
        """Seconds; ranks send a heartbeat a second."""
        return RANK_SILENCE_S if self.heartbeat_timeout_s is None else max(2.0, self.heartbeat_timeout_s)

    @property
    def node_silence_s(self) -> float:
        return NODE_SILENCE_S if self.heartbeat_timeout_s is None else self.heartbeat_timeout_s

    @property
    def instance_silence_s(self) -> float:
        return INSTANCE_SILENCE_S if self.heartbeat_timeout_s is None else self.heartbeat_timeout_s

    @property
    def is_given(self) -> bool:
        """Whether secret or TLS are set: they are between engines or machines only."""
        return any((self.cluster_key_file, self.cluster_tls, self.cluster_tls_cert, self.cluster_insecure))


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    debug_check: Annotated[bool, "check every invariant of the scheduler after every step (slow)"] = False
    debug_event_log: Annotated[str | None, "file for the scheduler's events, without prompts, for "
                               "`penstock sim --replay`"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    model: ModelConfig
    kv: KVConfig = field(default_factory=KVConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    pair: PairConfig = field(default_factory=PairConfig)
    nodes: NodesConfig = field(default_factory=NodesConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def is_routed(self) -> bool:
        """Whether it is one end of pairs that a router makes, for each prompt."""
        return self.server.router_dialect != "off" and self.pair.disaggregation_mode is not None

    @property
    def num_engines(self) -> int:
        """Engines of this server, all of them on this machine."""
        pair = self.pair
        return pair.prefill_replicas + pair.decode_replicas if pair.prefill_replicas else self.device.dp

    @property
    def ranks_here(self) -> int:
        """Ranks of one engine on one of its machines, at most: whole stages, or TP ranks of one."""
        nodes, stages, tp_size = max(1, self.nodes.num), max(1, self.device.pp), max(1, self.device.tp)
        return -(-stages // nodes) * tp_size if nodes <= stages else -(-tp_size // (nodes // stages))

    def gpus_of(self, engine: int, num_gpus: int) -> list[int]:
        """Numbers of the GPUs that this engine's ranks have, in their order, of so many of a machine: with
        fewer than ranks of all engines several have the same."""
        ranks = self.ranks_here
        return [(engine * ranks + i) % num_gpus for i in range(min(ranks, num_gpus))]


# "section.field" of what only an HTTP server has a use for: refused by the other commands.
SERVE_ONLY = frozenset({
    "model.served_model_name", "schedule.max_waiting", "device.dp", "kv.kv_events_config",
    *(f"server.{name}" for name in get_type_hints(ServerConfig)),
    *(f"pair.{name}" for name in get_type_hints(PairConfig)),
    *(f"nodes.{name}" for name in get_type_hints(NodesConfig)),
    *(f"cluster.{name}" for name in get_type_hints(ClusterConfig) if name != "heartbeat_timeout_s")})

# The same for a worker of Dynamo, whose frontend has the HTTP side, templates and parsers.
FRONTEND_ONLY = frozenset({
    "model.tokenizer", "model.default_chat_template_kwargs", "model.tool_call_parser", "model.reasoning_parser",
    "kv.kv_events_config", "schedule.max_waiting", "pair.prefill_replicas", "pair.decode_replicas",
    "pair.disaggregation_connect",
    *(f"server.{name}" for name in get_type_hints(ServerConfig) if name not in ("drain_s", "drain_store_s"))})

# "section.field" of every Secret.
SECRETS = frozenset(
    f"{section}.{name}" for section, cls in get_type_hints(Config).items()
    for name, hint in get_type_hints(cls, include_extras=True).items()
    if any(isinstance(meta, Secret) for meta in get_args(hint)[1:]))
