"""`penstock bench --plot-hot`: share of selected units that a hot buffer of a given size has already.

A real text, so that selections move as they do in use: the topics of Python's `help`, which every Python
brings along. The engine starts anew for each size, as the size is a setting of the device's memory.
"""
from __future__ import annotations

import pydoc_data.topics
from argparse import Namespace
from dataclasses import replace

from penstock.bench.report import optional, plot_line, table, write_json
from penstock.config.base.errors import ConfigError
from penstock.config.request.params import SamplingParams
from penstock.config.settings.tree import Config
from penstock.llm.llm import AsyncLLM

SIZES = (1.0, 1.5, 2.0, 3.0, 4.0)      # hot buffers, times the budget; each and one page
GROWN = 80             # tokens in which a hot buffer that may grow has: they are not counted


async def measure(config: Config, args: Namespace) -> int:
    """One request of `args.hot_context` tokens of prompt a size, decoding from host pages only.

    Raises ConfigError without --sparse-top-k, for a text or a context that is too short.
    """
    kv = config.kv
    if kv.sparse_top_k is None:
        raise ConfigError("--plot-hot is for decode from host pages: add --sparse-top-k N")
    if kv.hot_buffer_tokens is not None or kv.host_decode == "off":
        raise ConfigError("--plot-hot sets --host-decode always and --hot-buffer-tokens itself: leave them out")
    if args.against is not None or args.plot is not None:
        raise ConfigError("--plot-hot is a bench of its own: leave --against and --plot out")
    sizes = [int(times * kv.sparse_top_k) + kv.page_tokens() for times in SIZES]
    sizes = [size for size in sizes if size <= args.hot_context] or sizes[:1]
    rows, found, shares = [], [], []
    bar = optional("tqdm").tqdm(total=len(sizes), unit="size", disable=args.quiet or None)
    for size in sizes:
        hot = replace(config, kv=replace(kv, host_decode="always", hot_buffer_tokens=size,
                                              prefix_cache=False))
        async with AsyncLLM(config=hot) as llm:
            first = await _reads(llm, args.hot_context, GROWN)
            reads = await _reads(llm, args.hot_context, GROWN + args.output_len)
            reads = {name: count - first[name] for name, count in reads.items()}
        shares.append(100 * reads["hot_hits"] / (reads["hot_hits"] + reads["hot_misses"]))
        rows.append((size, f"{shares[-1]:.1f} %", f"{reads['host_bytes'] / args.output_len / 2**20:.2f}"))
        found.append({**reads, "hot_buffer_tokens": size})
        bar.update()
    bar.close()
    about = (f"{config.model.model}, {config.model.dtype}, budget {kv.sparse_top_k} of {args.hot_context} "
             f"tokens, units of {kv.sparse_block_size}, {args.output_len} new")
    print(f"\n{about}\n")
    print(table(("hot buffer, tokens", "hits", "MiB a token from the host"), rows))
    if args.output_json:
        write_json(args.output_json, {"about": about, "sizes": found})
    plot_line(args.plot_hot, about, "hot buffer, tokens", "hits, % of selected units", sizes, shares)
    return 0


async def _reads(llm: AsyncLLM, context: int, new: int) -> dict[str, int]:
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    prompt = llm.encode(text[:context * 8])[:context]
    if len(prompt) < context or context + new > llm.max_model_len:
        raise ConfigError(f"--hot-context {context}: the text has {len(prompt)} tokens and this engine "
                          f"a context of {llm.max_model_len}, of which --output-len and {GROWN} take {new}")
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    [result] = await llm.generate({"prompt_token_ids": prompt}, params)
    if not result.kv_reads:
        raise ConfigError(f"--hot-context {context}: a request of {context} tokens and {new} new ones is no "
                          "longer than --sparse-top-k, so it selects nothing")
    return result.kv_reads
