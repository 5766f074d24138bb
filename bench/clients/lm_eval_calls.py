"""lm-eval: a task that generates and one of multiple choice, and log-likelihoods for the caller to compare.

    python lm_eval_calls.py URL FOLDER      FOLDER has the tokenizer; scores.json is left there
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import lm_eval
from calls import MODEL, V1, call, main
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

FOLDER = Path(sys.argv[2])
DOCS = [{"q": "The capital of France is", "choices": ["Paris", "Rome", "Berlin"], "answer": 0},
        {"q": "The capital of Italy is", "choices": ["Paris", "Rome", "Berlin"], "answer": 1},
        {"q": "The capital of Germany is", "choices": ["Paris", "Rome", "Berlin"], "answer": 2}]
PAIRS = [(d["q"], " " + c) for d in DOCS for c in d["choices"]] + [
    ("", "Once upon a time"), ("Water boils at 100 degrees. " * 40, "It freezes at 0 degrees.")]


def model() -> LocalCompletionsAPI:
    return LocalCompletionsAPI(model=MODEL, base_url=V1 + "/completions", tokenizer=str(FOLDER),
                               tokenizer_backend="huggingface", max_length=8000, num_concurrent=4)


def evaluate(kind: str, **task):
    data = FOLDER / "docs.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCS)))
    config = {"task": kind, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
              "test_split": "test", "doc_to_text": "{{q}}", "output_type": kind, **task}
    found = lm_eval.simple_evaluate(model=model(), tasks=[config], bootstrap_iters=0, log_samples=False)
    return found["results"][kind]


@call
def generate_until():
    got = evaluate("generate_until", doc_to_target="{{choices[answer]}}",
                   generation_kwargs={"until": ["."], "max_gen_toks": 8, "temperature": 0},
                   metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}])
    assert any("exact_match" in name for name in got), got


@call
def multiple_choice():
    got = evaluate("multiple_choice", doc_to_target="answer", doc_to_choice="choices",
                   metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}])
    assert got["acc,none"] >= 2 / 3, got


@call
def loglikelihoods():
    lm = model()
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    told = lm.loglikelihood(asked)
    rows = []
    for (context, continuation), (score, greedy) in zip(PAIRS, told, strict=True):
        before, behind = lm._encode_pair(context, continuation) if context else (
            [lm.prefix_token_id], lm.tok_encode(continuation))
        rows.append({"context": before, "continuation": behind, "score": score, "greedy": greedy})
    (FOLDER / "scores.json").write_text(json.dumps(rows))


main()
