"""The frozen config tree: every knob, its unit, its default. Owns no behaviour.

`None` means "decided once at start" (`resolve`); nothing mutates it later. The `Annotated` text is
the help of the generated flag; `Alias` holds the spellings that users of the peers already type.
`refuse.py` lists what does not work together.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args, get_type_hints


class Alias:
    """Other spellings of a flag, with their dashes."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Bytes:
    """Marks an int that is a size: the command line takes 512M, 4GiB, 1e9 or a plain number."""


class InUnit:
    """Other spellings of a flag of Bytes that take a plain number of `unit`, such as GB."""

    def __init__(self, unit: str, *names: str) -> None:
        self.unit, self.names = unit, names


class Inverse:
    """Spellings of a switch that turn it off, with their dashes."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Secret:
    """Marks a value that is never printed, logged or sent to another process."""


Dtype = Literal["auto", "float32", "bfloat16", "gguf"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
SparseKV = Literal["auto", "always", "off"]
ToolCallParser = Literal["auto", "none", "deepseek_v3", "deepseek_v31", "deepseek_v32", "glm", "hermes",
                         "kimi_k2", "llama3_json", "minimax_m2", "mistral", "qwen3_coder", "seed_oss"]
SamplingDefaults = Literal["model", "openai"]
ReasoningParser = Literal["auto", "none", "think", "gemma4", "kimi_vl", "minimax_m2_append_think",
                          "minimax_m3", "mistral", "seed_oss"]
GrammarBackend = Literal["auto", "llguidance", "none"]
DECODE_ENDS_MAX = 8             # of one prefill end
PREFILL_ENDS_MAX = 8            # that a router names to one decode end
LogFormat = Literal["text", "json"]
HttpLogLevel = Literal["debug", "info", "warning", "error", "critical"]
PairMode = Literal["prefill", "decode"]
TransferBackend = Literal["stream", "nixl", "mooncake"]
PairFallback = Literal["compute", "refuse"]
SpeculativeMethod = Literal["ngram", "mtp", "eagle3"]
RouterDialect = Literal["off", "sglang", "vllm"]
StoragePolicy = Literal["timeout", "wait_complete", "best_effort"]
Kept = Literal["auto", "bfloat16", "fp8_e4m3", "fp8"]
StorageWrites = Literal["write_through", "write_through_selective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: Annotated[str, "folder, .gguf file, hub id, or 'demo'"]
    tokenizer: Annotated[str | None, "folder or file (default: the model's own)",
                         Alias("--tokenizer-path")] = None
    served_model_name: Annotated[tuple[str, ...], "names in the HTTP API; an answer has the one that was "
                                 "asked for, else the first (default: the model's)"] = ()
    dtype: Annotated[Dtype, "compute and KV type; auto is float32 on a CPU, on a GPU the checkpoint's own, "
                     "bfloat16 for GGUF and float16; gguf (on a CPU) is float32 over weights that stay "
                     "packed, as their .gguf file has them"] = "auto"
    load_format: Annotated[LoadFormat, "dummy makes random weights from config.json"] = "auto"
    max_model_len: Annotated[int | None, "tokens of prompt and output (default: the model's)",
                             Alias("--context-length", "--ctx-size", "-c")] = None
    revision: Annotated[str | None, "branch, tag or commit of a hub id (default: main)"] = None
    download_dir: Annotated[str | None, "folder for downloads from the hub (default: $HF_HUB_CACHE, else the "
                            "cache of Hugging Face's tools)"] = None
    hf_overrides: Annotated[str | None, "JSON object: fields in place of those of config.json",
                            Alias("--json-model-override-args")] = None
    rope_scaling: Annotated[str | None, 'JSON object in place of config.json\'s: {"rope_type": "yarn", '
                            '"factor": 4.0, "original_max_position_embeddings": 32768} is for '
                            '131,072 tokens'] = None
    generation_config: Annotated[str, "whose generation_config.json has the sampling values of requests that "
                                 "name none: auto (the model's), none, vllm (the same), or a folder"] = "auto"
    sampling_defaults: Annotated[SamplingDefaults, "model: those of generation_config.json; openai: "
                                 "temperature and top_p 1"] = "model"
    override_generation_config: Annotated[
        str | None, "JSON object: temperature, top_k, top_p, min_p, repetition_penalty in place of the "
        "model's"] = None
    chat_template: Annotated[str | None, "Jinja template file, in place of the model's"] = None
    default_chat_template_kwargs: Annotated[
        str | None, "JSON object: names for the chat template, where a request's chat_template_kwargs has no "
        "other value", Alias("--chat-template-kwargs")] = None
    tool_call_parser: Annotated[ToolCallParser, "the format of the model's calls of tools, also by its name "
                                "in SGLang and vLLM; auto finds it by the chat template"] = "auto"
    reasoning_parser: Annotated[ReasoningParser, "the marks of reasoning in answers, also by their name in "
                                "SGLang and vLLM; think: <think> (Qwen3, DeepSeek, GLM, Kimi, MiniMax); auto "
                                "finds them by the chat template"] = "auto"
    grammar_backend: Annotated[GrammarBackend, "what makes answers match a schema, a regular expression or a "
                               "grammar; auto is llguidance where it is installed",
                               Alias("--guided-decoding-backend")] = "auto"
    seed: Annotated[int | None, "of requests without a seed (default: drawn at start), and of dummy weights",
                    Alias("--random-seed")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    page_size: Annotated[int, "tokens per page: 1 to 256", Alias("--block-size")] = 16
    state_interval: Annotated[int | None, "tokens from a state that is kept for later prompts to the next, "
                              "of models that have states, a multiple of --page-size (default: as many as "
                              "have KV of a quarter of a state's size, 128 at least)"] = None
    hbm_bytes: Annotated[int | None, "device bytes for KV (default: measured once, at start)",
                         Bytes(), Alias("--kv-cache-memory-bytes")] = None
    memory_fraction: Annotated[float | None, "without --hbm-bytes: on a GPU the share of its memory that "
                               "may be used, by weights, activations and KV together (default: 0.9); on a "
                               "CPU the share of the free memory for KV (default: 0.3)",
                               Alias("--gpu-memory-utilization", "--mem-fraction-static")] = None
    host_tier: Annotated[bool | None, "copies of pages in host memory: of --dram-bytes, of --dram-ratio, "
                         "else of half of what is free", Alias("--enable-hierarchical-cache")] = None
    dram_bytes: Annotated[int | None, "host bytes for KV, 0 for no host tier (default: 0, or half of what is "
                          "free with --host-tier or with requests that may decode from host pages)",
                          Bytes(), InUnit("GB", "--hicache-size"),
                          InUnit("GiB", "--kv-offloading-size")] = None
    dram_ratio: Annotated[float | None, "host bytes for KV copies as a multiple of the device pool",
                          Alias("--hicache-ratio")] = None
    sparse_kv: Annotated[SparseKV | None, "decode from host pages: auto when device pages are short, always, "
                         "or off (default: auto, where the model selects)"] = None
    sparse_top_k: Annotated[int | None, "tokens of each KV head that a decode step selects and reads, of a "
                            "model without a selector of its own: default and largest of a request"] = None
    sparse_unit: Annotated[int, "tokens selected together: 4 to 16, divides --page-size"] = 8
    sparse_dense_layers: Annotated[tuple[str, ...], "layers that read all of their KV, which stays on the "
                                   "device, e.g. 0,1"] = ()
    hot_buffer_tokens: Annotated[int | None, "device tokens through which a request reads its host pages, "
                                 "at most: it has what a step selects and one page, what its drafts select "
                                 "beside while few rows run, and more while pages lie idle (default: 4 times "
                                 "what a step selects, or what all positions of a row with drafts do)"] = None
    prefix_cache: Annotated[bool, "keep finished requests' pages for later prompts",
                            Alias("--enable-prefix-caching"),
                            Inverse("--disable-radix-cache")] = True
    kv_storage: Annotated[str | None, "where pages of KV outlive the engine, and others share them: "
                          "file:///DIR, s3://BUCKET/PREFIX, valkey://HOST:PORT, valkey:///SOCKET or "
                          "mooncake://MASTER:PORT"] = None
    kv_storage_bytes: Annotated[int | None, "of a folder at most, of all engines (default: four fifths of "
                                "what is free at start, beside what it holds)", Bytes()] = None
    kv_storage_key: Annotated[str | None, "file with the secret of engines that share stored pages, 16 "
                              "characters or more (default: one in the folder, or the user's cache)"] = None
    kv_storage_write_rate: Annotated[int | None, "bytes a second that are stored at most", Bytes()] = None
    kv_storage_sync: Annotated[bool, "a page in a folder is on the disk before it counts as stored"] = False
    kv_storage_readonly: Annotated[bool, "find pages there, and store none"] = False
    kv_storage_policy: Annotated[StoragePolicy, "timeout: a request waits for stored pages while that is "
                                 "faster than computing them; wait_complete: until they have come; "
                                 "best_effort: it goes on when its turn has come",
                                 Alias("--hicache-storage-prefetch-policy")] = "timeout"
    kv_storage_write_policy: Annotated[StorageWrites, "write_through: all that is computed is stored; "
                                       "write_through_selective: what a second request has begun with",
                                       Alias("--hicache-write-policy")] = "write_through"
    kv_cache_dtype: Annotated[Kept, "type of a model's latent rows; auto is the compute type; fp8 is "
                              "fp8_e4m3, with a scale for 128 values"] = "auto"
    index_dtype: Annotated[Kept, "type of the keys of an indexer; auto is as --kv-cache-dtype"] = "auto"
    sparse_bounds_dtype: Annotated[Kept, "type of the bounds by which --sparse-top-k selects, rounded "
                                   "outward; auto is the compute type"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    max_num_seqs: Annotated[int, "rows: requests decoding at once",
                            Alias("--max-running-requests", "--parallel", "-np")] = 16
    step_tokens: Annotated[int | None, "token budget of one step, prefill and decode together (default: "
                           "512; on a GPU 8192, or 1024 for small models)",
                           Alias("--chunked-prefill-size", "--max-num-batched-tokens",
                                 "--batch-size", "-b")] = None
    overlap: Annotated[bool, "plan step n+1 before step n has finished",
                       Alias("--async-scheduling"), Inverse("--disable-overlap-schedule")] = True
    speculative_method: Annotated[SpeculativeMethod | None, "several tokens a step: ngram proposes what "
                                  "followed the newest occurrence of the last tokens, in prompt and answer, "
                                  "mtp what the layer says that the model's files have for it, eagle3 one "
                                  "from a folder of its own. No token changes by it (default: one token a "
                                  "step)"] = None
    speculative_model: Annotated[str | None, "of eagle3: the folder of the layer that drafts",
                                 Alias("--speculative-draft-model-path")] = None
    speculative_tokens: Annotated[int, "tokens that are proposed a row and step, at most",
                                  Alias("--num-speculative-tokens")] = 3
    prompt_lookup_min: Annotated[int, "of ngram: last tokens that must have occurred before"] = 2
    prompt_lookup_max: Annotated[int, "of ngram: of more, the longest that has is taken"] = 4
    max_waiting: Annotated[int | None, "queued requests before 503 (default: 4x --max-num-seqs)",
                           Alias("--max-queued-requests")] = None

    @property
    def num_drafts(self) -> int:
        """Of a row and step, at most."""
        return self.speculative_tokens if self.speculative_method else 0

    @property
    def num_step_tokens(self) -> int:
        assert self.step_tokens is not None, "neither resolved nor told by a model"
        return self.step_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    device: Annotated[Literal["auto", "cpu", "cuda"], "where the model runs; auto is the GPU where there is "
                      "one that torch can use"] = "auto"
    gpu_layers: Annotated[int | None, "layers on the GPU: all of them, or 0 for the CPU (default: all, where "
                          "there is a GPU)", Alias("--n-gpu-layers", "-ngl")] = None
    cuda_graphs: Annotated[bool, "on a GPU: capture decode steps at start, and replay them",
                           Inverse("--enforce-eager", "--disable-cuda-graph")] = True
    threads: Annotated[int | None, "CPU threads for the model (default: usable cores)",
                       Alias("-t")] = None
    cpu_isa: Annotated[Literal["native", "avx2", "plain"], "most of the CPU's instructions that kernels use, "
                       "to measure what a smaller one would do"] = "native"
    pp: Annotated[int, "pipeline stages, each a process with its own layers and --hbm-bytes",
                  Alias("--pipeline-parallel-size", "--pp-size", "-pp")] = 1
    pp_layers: Annotated[tuple[str, ...], "layers of each stage, e.g. 10,12,8 (default: even)"] = ()
    tp: Annotated[int, "lanes of each stage, which have its heads, MLP columns, experts and words between "
                  "them, each a process with --hbm-bytes of its own",
                  Alias("--tensor-parallel-size", "--tp-size", "-tp")] = 1
    ep: Annotated[int, "ranges of experts over the lanes (default: each has columns of all)",
                  Alias("--expert-parallel-size", "--ep-size", "-ep")] = 1
    expert_parallel: Annotated[bool, "as many ranges of experts as lanes",
                               Alias("--enable-expert-parallel", "--enable-ep-moe")] = False
    rank_timeout_s: Annotated[float, "seconds that ranks in processes may compute at a step before they "
                              "count as hung", Alias("--watchdog-timeout")] = 300.0
    rank_silence_s: Annotated[float, "seconds of a rank's process without a word, of ranks that all wait "
                              "for each other, or of a GPU at one step, after which they count as hung"] = 6.0
    backends: Annotated[tuple[str, ...], "OP=NAME choices, e.g. linear=reference"] = ()

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp

    @property
    def expert_ranges(self) -> int:
        return self.tp if self.expert_parallel else self.ep


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: Annotated[str, "address to bind"] = "127.0.0.1"
    dp: Annotated[int, "engines behind this address, each with --hbm-bytes and all else of its own; a prompt "
                  "goes where its KV is, else to one with little to do",
                  Alias("--data-parallel-size", "--dp-size", "-dp")] = 1
    port: Annotated[int, "TCP port; 0 takes a free one and prints it"] = 8000
    api_key: Annotated[str | None, "required from clients when set; others on this machine see "
                       "it in the process list: prefer a file", Secret()] = field(
                           default=None, repr=False)
    api_key_file: Annotated[str | None, "file with one key a line"] = None
    admin_key_file: Annotated[str | None, "beside API keys: file of those that may also read metrics and "
                              "server_info, and flush; one a line"] = None
    admin_api_key: Annotated[str | None, "the same as one key; others on this machine see it in the process "
                             "list (default: one API key alone may do all that too)", Secret()] = field(
                                 default=None, repr=False)
    ssl_certfile: Annotated[str | None, "PEM file with the server's certificate: serve HTTPS; read again on "
                            "SIGHUP"] = None
    ssl_keyfile: Annotated[str | None, "PEM file with its key (default: in --ssl-certfile)"] = None
    cors_origins: Annotated[tuple[str, ...], "origins whose pages may ask from a browser, e.g. "
                            "https://chat.example.com; * is all of them"] = ()
    clip_max_tokens: Annotated[bool, "a max_tokens that does not fit the context beside its prompt is "
                               "clipped, and the usage has clipped_max_tokens; off: it is a 400"] = False
    body_bytes_max: Annotated[int | None, "largest request body (default: 16 bytes for each token of the "
                              "context, 4 MiB at least)", Bytes()] = None
    router_dialect: Annotated[RouterDialect, "whose worker it is for a router in front, which sends a prompt "
                              "to both ends of a pair; sglang: without GET /version, by whose answer smg "
                              "takes a worker for vLLM's"] = "off"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "what is logged"] = "info"
    log_format: Annotated[LogFormat, "of the log on stderr; text has times and levels where that is no "
                          "terminal, json is an object a line"] = "text"
    log_stats_interval: Annotated[float, "seconds between two status lines while requests run: running, "
                                  "waiting, KV in use, tokens a second, prefix hits; 0: none",
                                  Alias("--decode-log-interval")] = 10.0
    access_log: Annotated[bool | None, "a log line for each HTTP request; also on with --log-level debug",
                          Inverse("--disable-uvicorn-access-log")] = None
    log_level_http: Annotated[HttpLogLevel | None, "of the HTTP server's own messages (default: warning)",
                              Alias("--uvicorn-log-level")] = None
    timeout_keep_alive: Annotated[int, "seconds that an idle connection stays open: longer than clients and "
                                  "proxies keep one, which else send a request into a closed one"] = 65
    drain_s: Annotated[float, "seconds that SIGTERM gives running requests"] = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    prefill: Annotated[int, "with --decode M: engines for prompts, on this machine too"] = 0
    decode: Annotated[int, "with --prefill N: engines that decode, and answer"] = 0
    disaggregation_mode: Annotated[PairMode | None, "be one end of a pair of engines: prefill computes "
                                   "prompts, decode has the HTTP address and forwards them"] = None
    pair_peer: Annotated[tuple[str, ...], "HOST:PORT, unix:PATH or unix:@NAME, where a prefill end listens; "
                         "several, separated by commas: who has least to do computes a prompt"] = ()
    pair_listen: Annotated[str | None, "HOST:PORT, unix:PATH or unix:@NAME, on which the prefill "
                           "end listens"] = None
    pair_key_file: Annotated[str | None, "file with the secret of both ends, 16 characters or more (default: "
                             "$PENSTOCK_PAIR_KEY)"] = None
    pair_tls: Annotated[bool, "TLS between the ends, on the one that connects; the other has a "
                        "certificate"] = False
    pair_tls_cert: Annotated[str | None, "PEM file with the certificate of the end that listens, and its "
                             "key"] = None
    pair_plaintext: Annotated[bool, "no TLS though the other end is on another machine: page bytes are then "
                              "neither secret nor authenticated"] = False
    disaggregation_transfer_backend: Annotated[
        TransferBackend, "how KV goes over: in the pair's own stream, or READ by the decode end, by NIXL or "
        "Mooncake's transfer engine, which encrypt nothing; both ends say the same"] = "stream"
    pair_fallback: Annotated[PairFallback, "without the prefill end: compute prompts here, or refuse with "
                             "503"] = "compute"
    pair_timeout_s: Annotated[float, "seconds that a request waits for the KV of its prompt before that is "
                              "computed here"] = 300.0
    pair_silence_s: Annotated[float, "seconds without a word after which the other end counts as gone"] = 10.0
    pair_allow: Annotated[tuple[str, ...], "hosts to which a router may tell this decode end to connect, "
                          "as it names them, separated by commas (default: any)"] = ()
    pair_room_s: Annotated[float, "seconds that a prompt which a router sent to one end waits for the other "
                           "one"] = 30.0

    @property
    def num_peers(self) -> int:
        """Engines of the other end that one end has a place for; 0 without another end."""
        if self.disaggregation_mode == "decode":
            return len(self.pair_peer) or PREFILL_ENDS_MAX
        return DECODE_ENDS_MAX if self.disaggregation_mode == "prefill" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig:
    nnodes: Annotated[int | None, "machines over which the ranks of this engine go; all run the same command "
                      "(default: 1, or $WORLD_SIZE of torchrun)"] = None
    node_rank: Annotated[int | None, "which of them this is; 0 has the HTTP address (default: 0, or $RANK of "
                         "torchrun)"] = None
    dist_init_addr: Annotated[str | None, "HOST:PORT on which node 0 listens for the others, with a port "
                              "more for each further engine (default: $MASTER_ADDR of torchrun, the port "
                              "after $MASTER_PORT)"] = None
    node_key_file: Annotated[str | None, "file with the secret of all nodes, 16 characters or more (default: "
                             "$PENSTOCK_NODE_KEY)"] = None
    node_tls_cert: Annotated[str | None, "TLS between nodes: PEM file with a certificate and its key, which "
                             "node 0 reads"] = None
    node_plaintext: Annotated[bool, "no TLS though nodes are on several machines: what they say, and sums of "
                              "lanes on several of them, are then not secret"] = False
    node_silence_s: Annotated[float, "seconds without a word after which a node counts as gone"] = 5.0

    @property
    def num(self) -> int:
        return self.nnodes or 1

    @property
    def rank(self) -> int:
        return self.node_rank or 0

    def of_engine(self, n: int) -> NodesConfig:
        """Of engine `n` of several: each meets its nodes at a port of its own, the next."""
        if self.dist_init_addr is None:
            return self
        host, _, port = self.dist_init_addr.rpartition(":")
        return replace(self, dist_init_addr=f"{host}:{int(port) + n}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    check: Annotated[bool, "check every invariant after every step (slow)"] = False
    event_log: Annotated[str | None, "file that receives core events, without prompts"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    model: ModelConfig
    kv: KVConfig = field(default_factory=KVConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    pair: PairConfig = field(default_factory=PairConfig)
    nodes: NodesConfig = field(default_factory=NodesConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def is_routed(self) -> bool:
        """Whether it is one end of pairs that a router makes, for each prompt."""
        return self.server.router_dialect != "off" and self.pair.disaggregation_mode is not None

    @property
    def num_engines(self) -> int:
        """Of this server, all of them on this machine."""
        return self.server.dp if not self.pair.prefill else self.pair.prefill + self.pair.decode

    @property
    def ranks_here(self) -> int:
        """Of one engine on one of its machines, at most: whole stages, or lanes of one."""
        nodes, stages, lanes = max(1, self.nodes.num), max(1, self.device.pp), max(1, self.device.tp)
        return -(-stages // nodes) * lanes if nodes <= stages else -(-lanes // (nodes // stages))

    def gpus_of(self, engine: int, num_gpus: int) -> list[int]:
        """Numbers of the GPUs that this engine's ranks have, in their order, of so many of a machine: with
        fewer than ranks of all engines several have the same."""
        ranks = self.ranks_here
        return [(engine * ranks + i) % num_gpus for i in range(min(ranks, num_gpus))]


# "section.field" of what only an HTTP server has a use for: refused by the other commands.
SERVE_ONLY = frozenset({
    "model.served_model_name", "schedule.max_waiting",
    *(f"server.{name}" for name in get_type_hints(ServerConfig)),
    *(f"pair.{name}" for name in get_type_hints(PairConfig)),
    *(f"nodes.{name}" for name in get_type_hints(NodesConfig))})

# "section.field" of every Secret.
SECRETS = frozenset(
    f"{section}.{name}" for section, cls in get_type_hints(Config).items()
    for name, hint in get_type_hints(cls, include_extras=True).items()
    if any(isinstance(meta, Secret) for meta in get_args(hint)[1:]))
