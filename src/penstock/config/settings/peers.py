"""Flags of vLLM, SGLang and llama.cpp whose values are written in another way than ours, and their names for
parsers of calls and of reasoning."""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from penstock.config.base.errors import ConfigError
from penstock.config.settings.sglang import json_object, whole

VLLM, ALGORITHM, NUM_TOKENS, NUM_STEPS, TOPK = (
    "--speculative-config", "--speculative-algorithm", "--speculative-num-draft-tokens",
    "--speculative-num-steps", "--speculative-eagle-topk")
SPECULATION = (VLLM, ALGORITHM, NUM_TOKENS, NUM_STEPS, TOPK)
METHODS = {"ngram": "ngram", "mtp": "mtp", "nextn": "mtp", "deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp",
           "eagle3": "eagle3"}
OURS = {"num_speculative_tokens": "--speculative-tokens", "prompt_lookup_min": "--prompt-lookup-min",
        "prompt_lookup_max": "--prompt-lookup-max"}


# Names that both peers have for formats of ours, in lower case with `_`; ours are not repeated.
_CALLS = {
    "hermes": ("qwen", "qwen2", "qwen25", "qwen2_5", "qwen3", "granite4"),
    "qwen3_coder": ("qwen3_xml", "qwen3_5", "qwen35", "mimo", "step3p5", "nemotron_v3", "nemotron_3"),
    "llama3_json": ("llama3", "llama4_json"),
    "gpt_oss": ("openai",), "glm": ("glm4", "glm4_moe", "glm45", "glm46", "glm47", "glm5"),
    "deepseek_v3": ("deepseekv3", "deepseek_r1"), "deepseek_v31": ("deepseekv31",),
    "deepseek_v32": ("deepseekv32",), "kimi_k2": ("kimi_k25", "kimi"), "minimax_m2": ("minimax_m25",),
    "seed_oss": ("seed",), "mistral": ("mistral4",)}
_MARKS = {
    "think": ("deepseek_r1", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "qwen3",
              "qwen3_thinking", "qwen3_5", "glm4", "glm4_moe", "glm45", "glm46", "glm47", "glm5", "kimi_k2",
              "kimi_k25", "minimax", "minimax_m2", "step3", "step3p5", "nemotron_v3", "nemotron_3",
              "nano_v3", "mimo", "interns1", "olmo3", "holo2"),
    "gpt_oss": ("openai_gptoss",), "minimax_m2_append_think": ("minimax_append_think",), "kimi_vl": ("kimi",),
    "seed_oss": ("seed",), "mistral": ("magistral",)}
# Names of formats of weights: theirs of the kernels that compute with them, too.
_WEIGHTS = {"auto": ("none", "null", ""), "awq": ("awq_marlin",), "gptq": ("gptq_marlin",),
            "auto-round": ("auto_round", "inc"), "compressed-tensors": ("compressed_tensors", "w8a8_int8", "w8a8_fp8"),
            "modelopt": ("modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed")}
_PARSERS = {"tool_call_parser": _CALLS, "reasoning_parser": _MARKS, "quantization": _WEIGHTS}
# Names of the peers' for what is not read here.
_NOT_READ = {
    "tool_call_parser": frozenset((
        "apertus", "cohere_command3", "cohere_command4", "deepseek_v4", "deepseek_v41", "deepseekv4",
        "deepseekv41", "ernie45", "functiongemma", "gigachat3", "granite",
        "granite_20b_fc", "hunyuan", "hunyuan_a13b", "hy_v3", "interns1", "internlm", "jamba", "kimi_k3",
        "lfm2", "llama4", "llama4_pythonic", "longcat", "minimax", "olmo3",
        "phi4_mini_json", "poolside_v1", "pythonic", "step3", "trinity", "xlam")),
    "reasoning_parser": frozenset((
        "apertus", "cohere_command3", "cohere_command4", "deepseek_v41", "ernie45", "granite",
        "hunyuan", "hunyuan_a13b", "hy_v3", "identity", "kimi_k3", "poolside_v1"))}


def parser(field: str, flag: str, text: str) -> str:
    """Return our name of the parser, or format of weights, that a peer calls `text`; `text` for any other.

    Raises ConfigError: the peers read such answers, and nothing here does.
    """
    if field not in _PARSERS:
        return text
    name = text.lower().replace("-", "_").replace(".", "_")
    if name in _NOT_READ.get(field, ()):
        what, otherwise = (("calls of tools in this format are", "requests with tools are then refused")
                           if field == "tool_call_parser" else
                           ("reasoning in this form is", "it is then part of the text"))
        raise ConfigError(f"{flag} {text}: {what} not read here: leave the flag out ({otherwise}), or name a "
                          "format that the model writes as well")
    own = text.lower() if field == "quantization" else name
    return next((ours for ours, names in _PARSERS[field].items() if name in names), own)


def speculation(name: str, text: str) -> list[str]:
    """Our flags for one of theirs. Raises ConfigError that names what is not there."""
    if text.lower() in ("none", "null", "") and name != NUM_TOKENS:
        return []
    if name == ALGORITHM:
        return [_method(name, text)]
    if name == TOPK:
        if text != "1":
            raise ConfigError(f"{name} {text}: drafts are a chain, not a tree: 1 is what there is")
        return []
    if name == NUM_STEPS:
        return [f"--speculative-tokens={text}"]
    if name == NUM_TOKENS:              # theirs counts the position that is computed anyway
        if not text.isdecimal() or int(text) < 2:
            raise ConfigError(f"{name} {text}: a whole number from 2 on is needed, of positions that a row "
                              "computes in a step")
        return [f"--speculative-tokens={int(text) - 1}"]
    values = json_object(name, text, ("method", "model", *OURS))
    if "method" not in values:
        raise ConfigError(f'{name} {text}: say how, with "method": "ngram", "mtp" or "eagle3"')
    for key in OURS.keys() & values.keys():
        if not whole(values[key]):
            raise ConfigError(f"{name}: {key} is {json.dumps(values[key])}: a whole number of tokens is "
                              "needed")
    model = values.get("model")
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"{name}: model is {json.dumps(model)}: a folder is needed")
    return [_method(f"{name}: method", values["method"]),
            *([] if model is None else [f"--speculative-model={model}"]),
            *(f"{ours}={values[key]}" for key, ours in OURS.items() if key in values)]


def origins(name: str, text: str) -> list[str]:
    """vLLM's --allowed-origins, a JSON list. Raises ConfigError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = text.split(",")
    if not isinstance(found, list) or not all(isinstance(o, str) and "," not in o for o in found):
        raise ConfigError(f"{name} {text}: a JSON list of origins is needed, such as [\"*\"]")
    return [f"--cors-origins={','.join(found)}"]


def sampling(name: str, text: str) -> list[str]:
    """SGLang's --sampling-defaults, model or openai. Raises ConfigError."""
    if text not in ("model", "openai"):
        raise ConfigError(f"{name} {text}: choose from model, openai, or give --generation-config")
    return ["--generation-config=none"] if text == "openai" else []


def _counted(flag: str, *default: str) -> Callable[[str, str], list[str]]:
    """Return the value of one of llama.cpp's numbers: `default` are its words for what is so without the flag."""
    return lambda name, text: [] if text in default else [f"{flag}={text}"]


ROPE, SCALE, ORIGINAL = "--rope-scaling", "--rope-scale", "--yarn-orig-ctx"
OVERRIDES, SGLANG_OVERRIDES = "--hf-overrides", "--json-model-override-args"


def rope(given: Mapping[str, str]) -> list[str]:
    """Return --hf-overrides with the rope_scaling of --rope-scaling JSON, or of llama.cpp's three flags.

    given   name -> value of those that were typed, OVERRIDES too
    Raises ConfigError: a value that cannot be read, or RoPE is scaled by two flags.
    """
    scaling, own = _scaling(given), given.get(OVERRIDES)
    if scaling is None:
        return [] if own is None else [f"{OVERRIDES}={own}"]
    fields = json_object(OVERRIDES, own or "{}")
    if fields.keys() & {"rope_scaling", "rope_parameters"}:
        raise ConfigError(f"{ROPE}, {OVERRIDES}: both say how RoPE is scaled: give one of them")
    return [f"{OVERRIDES}={json.dumps({**fields, 'rope_scaling': scaling})}"]


def _scaling(given: Mapping[str, str]) -> dict[str, object] | None:
    kind = given.get(ROPE)
    numbers = {name: given[name] for name in (SCALE, ORIGINAL) if name in given}
    if kind is not None and kind not in ("none", "linear", "yarn"):
        if numbers:
            raise ConfigError(f"{', '.join(numbers)}: {ROPE} JSON has all of it: leave them out")
        return json_object(ROPE, kind)
    if kind is None and not numbers:
        return None
    if kind in (None, "none"):
        if numbers:
            raise ConfigError(f"{', '.join(numbers)}: say which scaling, with {ROPE} yarn or linear")
        return None
    if SCALE not in numbers:
        raise ConfigError(f"{ROPE} {kind}: how many times longer? Give {SCALE} N as well, or {ROPE} with a "
                          "JSON object")
    try:
        found: dict[str, object] = {"rope_type": kind, "factor": float(numbers[SCALE])}
        if ORIGINAL in numbers:
            found["original_max_position_embeddings"] = int(numbers[ORIGINAL])
    except ValueError:
        shown = ", ".join(f"{name} {number}" for name, number in numbers.items())
        raise ConfigError(f"{shown}: numbers are needed") from None
    return found


# (name, value) -> our flags; raises ConfigError. The keys are spellings that take a value.
TRANSLATED: dict[str, Callable[[str, str], list[str]]] = {
    **dict.fromkeys(SPECULATION, speculation),
    "--allowed-origins": origins,
    "--sampling-defaults": sampling,
    **dict.fromkeys(("-c", "--ctx-size"), _counted("--max-model-len", "0")),
    **dict.fromkeys(("-np", "--parallel"), _counted("--max-num-seqs", "-1")),
    **dict.fromkeys(("-t",), _counted("--threads", "-1")),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"),
                    _counted("--gpu-layers", "-1", "all", "auto")),
}


def _method(given: str, method: object) -> str:
    if (known := METHODS.get(str(method).lower())) is None:
        shown = method if isinstance(method, str) else json.dumps(method)
        raise ConfigError(f"{given} {shown}: ngram, mtp (nextn) and eagle3 are what there is")
    return f"--speculative-method={known}"
