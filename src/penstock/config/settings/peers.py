"""Speculation as vLLM (--speculative-config JSON) and SGLang (--speculative-algorithm) ask for it."""
from __future__ import annotations

import json

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


def _method(given: str, method: object) -> str:
    if (known := METHODS.get(str(method).lower())) is None:
        shown = method if isinstance(method, str) else json.dumps(method)
        raise ConfigError(f"{given} {shown}: ngram, mtp (nextn) and eagle3 are what there is")
    return f"--speculative-method={known}"
