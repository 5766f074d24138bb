"""Perplexity of fp8 weights, without and with fp8 activations, as `--backends linear=fp8` defines them; on a CPU.

    PYTHONPATH=src python lab/bench/fp8_activations.py MODEL.gguf [--tokens 2048] [--arms "blocks" "blocks, all" ...]

The model is transformers', in bfloat16 (it opens a GGUF with `accelerate`). Each linear of a layer gets a weight in
e4m3 (`penstock.kernels.types.packed`), which becomes bfloat16 for the product, as `linear=cuda` does with a prompt.
With activations its input goes through `triton_fp8.quantised`, the definition that the GPU's kernel is held to, and
products are of float32. `--fast` rounds these to bfloat16: 1/32 of the error of e4m3, half of the time. Embeddings and
lm_head stay, as in published checkpoints.
Text: half of it Python's help (`pydoc_data`, PSF licence), half this repository's guides; windows of 1,024 tokens, each
a prompt. An arm's name: the weights (floats, blocks, channel, tensor), then which linears have fp8 activations.
"""
from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from penstock.kernels.gemm.linear.triton_fp8 import quantised as activations
from penstock.kernels.types.packed import quantised

WINDOW, BLOCK = 1024, 64        # tokens of a prompt; of a block in errors: neighbours depend on each other
FORMS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "blocks": lambda o, i: (128, 128), "channel": lambda o, i: (1, i), "tensor": lambda o, i: (o, i)}
ARMS = tuple(f"{form}{some}" for form in FORMS for some in ("", ", all"))


class Linear(nn.Module):
    """A linear whose weight and input are rounded as the arm says."""

    def __init__(self, name: str, layer: float, inner: nn.Linear) -> None:
        super().__init__()
        self.name, self.layer, self.exact, self.bias = name, layer, inner.weight.data, inner.bias     # bfloat16
        self.weight, self.cols, self.dtype = self.exact, 0, torch.bfloat16

    def set(self, arm: str, fast: bool) -> None:
        form, _, some = arm.partition(", ")
        outputs, inputs = self.exact.shape
        self.cols = 0
        if takes_part(some, self.name, self.layer):
            self.cols = 128 if form == "blocks" else inputs
        self.dtype = torch.float32 if self.cols and not fast else torch.bfloat16
        self.weight = self.exact
        if form in FORMS:
            self.weight = quantised(self.exact.float(), *FORMS[form](outputs, inputs)).floats().to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.cols:
            x = activations(x.flatten(0, -2), self.cols).view(x.shape).to(self.dtype)
        out = F.linear(x, self.weight).bfloat16()
        return out if self.bias is None else out + self.bias


def takes_part(some: str, name: str, layer: float) -> bool:
    """Whether a linear has fp8 activations: `all`, `only WHICH` or `without WHICH`: part of a name, or of the layers
    the `first` or `last` tenth or the `middle`."""
    how, _, which = some.partition(" ")
    ends = {"first": layer < 0.1, "middle": 0.1 <= layer < 0.9, "last": layer >= 0.9}
    if how in ("only", "without"):
        return (ends[which] if which in ends else which in name) == (how == "only")
    return how == "all"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048, help="of each text")
    parser.add_argument("--fast", action="store_true", help="products in bfloat16 in every arm")
    parser.add_argument("--arms", nargs="+", default=ARMS)
    args = parser.parse_args()
    path = Path(args.model)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16,
                                                 quantization_config=GgufConfig(dequantize=True)).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    linears = []
    for number, layer in enumerate(model.model.layers):
        for part in (layer.self_attn, layer.mlp):
            for name, inner in list(part.named_children()):
                if isinstance(inner, nn.Linear):
                    linears.append(Linear(name, number / len(model.model.layers), inner))
                    setattr(part, name, linears[-1])
    texts = {"help": "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)),
             "guides": "\n".join(p.read_text() for p in sorted(Path("docs/guides").glob("*.md")))}
    windows = [ids[at:at + WINDOW] for text in texts.values()
               for ids in [tokenizer(text, return_tensors="pt").input_ids[0][:args.tokens]]
               for at in range(0, len(ids), WINDOW)]
    print(f"# {path.name}: {len(linears)} linears, {sum(map(len, windows))} tokens", flush=True)
    base, seen = dict[str, list[float]](), dict[str, list[int]]()
    with torch.no_grad():
        for arm in args.arms:
            for linear in linears:
                linear.set(arm, args.fast)
            losses, best = list[float](), list[int]()
            for ids_T in windows:
                logits = model(ids_T[None]).logits[0, :-1].float()
                losses += F.cross_entropy(logits, ids_T[1:], reduction="none").tolist()
                best += logits.argmax(-1).tolist()
            base[arm], seen[arm] = losses, best
            print(arm, f"{math.exp(statistics.fmean(losses)):.4f}", *(
                difference(losses, base[other], best, seen[other], other) for other in dict.fromkeys(
                    ("floats", arm.partition(", ")[0])) if other in base and other != arm), sep="  ", flush=True)


def difference(losses: list[float], others: list[float], best: list[int], seen: list[int], name: str) -> str:
    """Perplexity against another arm's in %, with two standard errors, and the share of the same first choices."""
    each = [a - b for a, b in zip(losses, others, strict=True)]
    means = [statistics.fmean(each[i:i + BLOCK]) for i in range(0, len(each) - BLOCK + 1, BLOCK)]
    error = 2 * statistics.stdev(means) / len(means) ** 0.5
    same = statistics.fmean(a == b for a, b in zip(best, seen, strict=True))
    more = 100 * math.expm1(statistics.fmean(each))
    return f"{more:+.2f} % (+- {100 * error:.2f}) of {name}, same {100 * same:.1f} %"


if __name__ == "__main__":
    main()
