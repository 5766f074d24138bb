"""Where one step of a SmolLM2-135M-shaped model goes: linears, attention, store and the rest.

Random weights, no scheduler, no sampling.

    python lab/bench/decode_step.py --dtype bfloat16 --rows 8 --context 300
    python lab/bench/decode_step.py --queries 512 --context 512 --rows 1
"""
from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.attention import paged_attention
from penstock.kernels.fused import layer
from penstock.kernels.gemm import linear
from penstock.kernels.platform import probe
from penstock.kernels.registry import choose
from penstock.kernels.types.ragged import Ragged
from penstock.model import registry as families

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}


class Clock:
    """Seconds of every wrapped call of a step and of the time between calls, the least of all steps.

    A step on a busy machine is never undisturbed; each of its 200 calls is, sooner or later.
    """

    def __init__(self) -> None:
        self.least: list[tuple[str, float]] = []
        self._step: list[tuple[str, float]] = []
        self._last = 0.0

    def start(self) -> None:
        self._step, self._last = [], time.perf_counter()

    def mark(self, name: str) -> None:
        """What has passed since the last mark belongs to `name`."""
        now = time.perf_counter()
        self._step.append((name, now - self._last))
        self._last = time.perf_counter()

    def wrap(self, name: str, call: Callable[..., Tensor | None]) -> Callable[..., Tensor]:
        def timed(*args: Tensor) -> Tensor:
            self.mark("rest")
            result = call(*args)
            self.mark(name)
            return result
        return timed

    def stop(self) -> float:
        """Seconds of the whole step."""
        self.mark("rest")
        self.least = [(name, min(new, old)) for (name, new), (_, old)
                      in zip(self._step, self.least or self._step, strict=True)]
        return sum(seconds for _, seconds in self._step)

    def totals(self) -> Counter[str]:
        """Least seconds by name."""
        totals: Counter[str] = Counter()
        for name, seconds in self.least:
            totals[name] += seconds
        return totals


def layout_of(rows: int, queries: int, context: int, page_size: int) -> Ragged:
    """`rows` rows of one run of pages each, contexts up to a quarter shorter than `context`."""
    pages = -(-context // page_size)
    contexts = [max(queries, context - (5 * i) % max(1, context // 4)) for i in range(rows)]
    positions = torch.cat([torch.arange(c - queries, c) for c in contexts])
    row = torch.arange(rows).repeat_interleave(queries)
    return Ragged(tuple(range(0, rows * queries + 1, queries)), tuple(contexts), tuple(range(rows)),
                  torch.arange(rows * pages, dtype=torch.int32).view(rows, pages),
                  row * pages + positions // page_size, positions % page_size, page_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--queries", type=int, default=1, help="tokens of each row")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--backends", nargs="*", default=[], metavar="op=name")
    args = parser.parse_args()
    torch.set_num_threads(1)              # until the model is there: packing gains nothing
    torch.set_grad_enabled(False)
    dtype = getattr(torch, args.dtype)
    choices = choose(probe(), dict(pair.split("=") for pair in args.backends),
                     ("linear", "paged_attention", "layer"))
    clock = Clock()

    def pack(weight_OI: Tensor, bias_O: Tensor | None) -> linear.Linear:
        return clock.wrap("linear", linear.pack(weight_OI, bias_O, backend=choices["linear"].name))
    model = families.build(SMOLLM2, dtype=dtype, linear=pack,
                           ops=layer.OP.use(choices["layer"].name))
    for name, tensor in families.dummy_tensors(SMOLLM2, 0):
        model.load(name, tensor)
    model.finish()
    torch.set_num_threads(args.threads)
    layout = layout_of(args.rows, args.queries, args.context, args.page_size)
    pages = torch.randn(layout.pages_RM.numel(), 30, 3, 2, args.page_size, 64).to(dtype)
    pools = [(pages[:, layer, :, 0], pages[:, layer, :, 1]) for layer in range(30)]
    spec = paged_attention.AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, dtype=dtype,
                                         scale=0.125)
    tokens = args.rows * args.queries
    ids = torch.randint(0, 49152, (tokens,))
    positions = torch.cat([torch.arange(c - args.queries, c) for c in layout.context])
    last = torch.tensor(layout.query_start[1:]) - 1
    write_kv = clock.wrap("write_kv", paged_attention.write_kv)

    def step() -> float:
        clock.start()
        run = paged_attention.prepare(layout, spec, backend=choices["paged_attention"].name)
        clock.mark("plan")
        plan = clock.wrap("attention", run)

        def attend(layer: int, q: Tensor, kv: Tensor, *, sinks_N: Tensor | None) -> Tensor:
            write_kv(kv[:, 0], kv[:, 1], *pools[layer], layout.page_T, layout.offset_T)
            return plan(q, *pools[layer], sinks_N)
        model.logits(model.forward(ids, positions, attend)[last])
        return clock.stop()

    best = min(step() for _ in range(args.repeats))
    for choice in choices.values():
        print(choice)
    totals = clock.totals()
    parts = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in totals.items())
    print(f"{args.dtype} {args.rows} x {args.queries} tokens, context {args.context}, "
          f"{args.threads} threads: best step {best * 1e3:.2f} ms; least of every call "
          f"{totals.total() * 1e3:.2f} ms ({parts}), {tokens / totals.total():.0f} tokens/s")


if __name__ == "__main__":
    main()
