"""Flags of vLLM, SGLang and llama.cpp whose values are written in another way than ours."""
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


def _counted(flag: str, *default: str) -> Callable[[str, str], list[str]]:
    """Of llama.cpp's numbers: `default` are its words for what is so without the flag."""
    return lambda name, text: [] if text in default else [f"{flag}={text}"]


ROPE, SCALE, ORIGINAL = "--rope-scaling", "--rope-scale", "--yarn-orig-ctx"


def rope(given: Mapping[str, str]) -> list[str]:
    """Our --rope-scaling for its JSON, or for llama.cpp's three flags. Raises ConfigError."""
    kind = given.get(ROPE)
    numbers = {name: given[name] for name in (SCALE, ORIGINAL) if name in given}
    if kind is not None and kind not in ("none", "linear", "yarn"):
        if numbers:
            raise ConfigError(f"{', '.join(numbers)}: {ROPE} JSON has all of it: leave them out")
        return [f"{ROPE}={kind}"]
    if kind is None and not numbers:
        return []
    if kind in (None, "none"):
        if numbers:
            raise ConfigError(f"{', '.join(numbers)}: say which scaling, with {ROPE} yarn or linear")
        return []
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
    return [f"{ROPE}={json.dumps(found)}"]


# (name, value) -> our flags; raises ConfigError. The keys are spellings that take a value.
TRANSLATED: dict[str, Callable[[str, str], list[str]]] = {
    **dict.fromkeys(SPECULATION, speculation),
    "--allowed-origins": origins,
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
