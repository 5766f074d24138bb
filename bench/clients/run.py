"""`make clients`: what people use, unchanged, each in an environment of its own, against one server.

    python bench/clients/run.py [NAME ...]

Builds what is missing in .cache/clients, writes docs/getting-started/clients.md and results/clients.json.
Owns the environments, the server (the demo model, with a chat template that knows tools) and the table.
"""
from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "clients"
TABLE = ROOT / "docs/getting-started/clients.md"
RESULTS = ROOT / "bench" / "results" / "clients.json"
LIMIT_S = 3600
LOGPROB = 1e-3
# Name: script, what pip installs, the package whose version is told.
CLIENTS = {
    "openai": ("openai_calls.py", ["openai"]),
    "anthropic": ("anthropic_calls.py", ["anthropic"]),
    "litellm": ("litellm_calls.py", ["litellm"]),
    "langchain-openai": ("langchain_calls.py", ["langchain-openai"]),
    "inspect-ai": ("inspect_calls.py", ["inspect-ai", "openai"]),
    "lm-eval": ("lm_eval_calls.py", ["lm-eval[api]", "transformers"]),
    "guidellm": ("command_calls.py", ["guidellm"]),
    "aiperf": ("command_calls.py", ["aiperf"]),
    "smg": ("router_calls.py", ["smg==1.13.0", "openai"]),
    "sglang-router": ("router_calls.py", ["sglang-router==0.3.2", "openai"]),
}


def environment(name: str) -> Path:
    """The python of its environment, which is built once."""
    folder, wanted = CACHE / name, " ".join(CLIENTS[name][1])
    python, done = folder / "bin" / "python", folder / ".done"
    if not done.exists() or done.read_text().strip() != wanted:
        print(f"{name}: pip install {wanted}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q",
                        *CLIENTS[name][1]], check=True)
        done.write_text(wanted)
    return python


def version(python: Path, name: str) -> str:
    ask = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([str(python), "-c", ask], capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def server(log: Path) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "serve", "demo", "--served-model-name", "demo", "--port", "0",
         "--kv-cache-memory-bytes", "400M", "--dtype", "float32", "--threads", "1",
         "--chat-template", str(ROOT / "tests" / "data" / "templates" / "hermes.jinja")],
        stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"ready on (http://\S+) ", process.stdout.readline())
        assert found, log.read_text()
        yield found.group(1)
    finally:
        process.terminate()
        process.wait(60)


def tokenizer_folder(into: Path) -> None:
    """The demo's tokenizer, as Hugging Face's libraries read one."""
    from penstock.model.weights.locate import locate
    from penstock.text.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(locate("demo"))
    assert tokenizer is not None
    (into / "tokenizer.json").write_text(tokenizer.raw.to_str())
    (into / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "model_max_length": 8192, "chat_template": tokenizer.chat_template}))
    (into / "config.json").write_text(json.dumps({"model_type": "llama"}))


def farthest(scores: Path) -> float:
    """How far a log-likelihood that lm-eval was told is from that of transformers in float32."""
    sys.path.insert(0, str(ROOT / "tests" / "parity"))
    from demo_reference import Reference

    from penstock.model.weights.locate import locate

    model, worst = Reference.load(locate("demo")).model, 0.0
    for row in json.loads(scores.read_text()):
        ids, count = row["context"] + row["continuation"], len(row["continuation"])
        with torch.inference_mode():
            logprobs_TV = model(torch.tensor([ids])).logits[0, -count - 1:-1].log_softmax(-1)
        right = sum(float(logprobs_TV[i, token]) for i, token in enumerate(ids[-count:]))
        worst = max(worst, abs(right - row["score"]))
    return worst


def results(name: str, url: str, folder: Path) -> list[dict[str, str]]:
    python, script = environment(name), HERE / CLIENTS[name][0]
    got = subprocess.run([str(python), str(script), url, str(folder), name], stdout=subprocess.PIPE,
                         text=True, timeout=LIMIT_S, cwd=folder)
    found = [json.loads(line) for line in got.stdout.splitlines() if line.startswith('{"call"')]
    if not found:
        found = [{"call": "its script", "why": f"exit {got.returncode} before the first call"}]
    if name == "lm-eval" and (folder / "scores.json").exists():
        worst = farthest(folder / "scores.json")
        why = "" if worst <= LOGPROB else f"{worst:.1e} away"
        found.append({"call": "log-likelihoods within 1e-3 of transformers", "why": why})
        print(f"lm-eval: log-likelihoods at most {worst:.1e} from transformers'", flush=True)
    return found


def table(told: dict[str, dict]) -> str:
    lines = ["# Clients", "",
             "Unchanged, each in an environment of its own, against one `penstock serve demo` on a CPU:",
             "`make clients` writes this table. The scripts are in `bench/clients/`.", "",
             "| client | version | calls that work | which do not |", "|---|---|---|---|"]
    for name in CLIENTS:
        if name in told:
            calls = told[name]["calls"]
            wrong = [f"{c['call']}: {c['why']}" for c in calls if c["why"]]
            shown = "; ".join(wrong).replace("|", "/") or "-"
            good = f"{len(calls) - len(wrong)} of {len(calls)}"
            lines.append(f"| {name} | {told[name]['version']} | {good} | {shown} |")
    lines += ["", "## The calls", ""]
    for name in CLIENTS:
        if name in told:
            lines.append(f"- {name}: " + ", ".join(c["call"].replace("_", " ") for c in told[name]["calls"]))
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(CLIENTS)}")
    names = parser.parse_args(argv).names
    if unknown := [name for name in names if name not in CLIENTS]:
        parser.error(f"no client {', '.join(unknown)}: there are {', '.join(CLIENTS)}")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tokenizer_folder(folder)
        with server(folder / "log") as url:
            for name in names or CLIENTS:
                calls = results(name, url, folder)
                print(f"{name}: {sum(not c['why'] for c in calls)} of {len(calls)}", flush=True)
                told = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
                told[name] = {"version": version(CACHE / name / "bin" / "python", name), "calls": calls,
                              "date": datetime.date.today().isoformat()}
                RESULTS.write_text(json.dumps(told, indent=1) + "\n")
                TABLE.write_text(table(told))
    return int(any(c["why"] for one in told.values() for c in one["calls"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
