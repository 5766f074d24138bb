"""What `penstock plan` prints."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.bench.report import percentile, shown, table
from penstock.config.base.sizes import show_bytes
from penstock.plan.grid import Point
from penstock.plan.trace import Trace

if TYPE_CHECKING:
    from penstock.plan.rates import Rates
    from penstock.plan.shape import Planned
    from penstock.plan.world import Result

TIERS = "device", "host", "storage"
KNEE = 0.02             # of the hit rate: more memory that gains less is past the knee


def of_trace(trace: Trace, largest: float) -> str:
    """`largest`: the share of prompt tokens that was seen before."""
    prompts = sorted(trace.prompts())
    answers = sum(turn.output for session in trace.sessions for turn in session.turns)
    return (f"{trace.name}: {len(trace.sessions):,} sessions, {len(prompts):,} requests, prompts of {prompts[0]:,} to "
            f"{prompts[-1]:,} tokens (median {prompts[len(prompts) // 2]:,}), {sum(prompts):,} in all, {answers:,} "
            f"output tokens\nhit rate of a cache without a limit: {largest:.3f}")


def numbers(r: Result) -> dict[str, float]:
    """All that is reported of a grid point, by name; times in ms, shares from 0 to 1."""
    prompts, seconds = max(1, r.prompt_tokens), max(1e-9, r.seconds)
    return {
        "hits": r.hits, "hits_device": r.device_tokens / prompts, "hits_host": r.host_tokens / prompts,
        "hits_storage": r.storage_tokens / prompts, "hits_largest": r.largest_hits,
        "ttft_p50_ms": 1e3 * percentile(r.ttft_s, 50), "ttft_p95_ms": 1e3 * percentile(r.ttft_s, 95),
        "itl_p50_ms": 1e3 * percentile(r.gaps_s, 50), "itl_p95_ms": 1e3 * percentile(r.gaps_s, 95),
        "output_tokens_s": r.output_tokens / seconds, "prompt_tokens_s": r.prompt_tokens / seconds,
        "seconds": r.seconds, "gpu_busy": r.device_busy, "load_busy": r.load_busy, "save_busy": r.save_busy,
        "storage_read_busy": r.read_busy, "storage_write_busy": r.write_busy, "load_bytes": r.load_bytes,
        "save_bytes": r.save_bytes, "swaps": r.swaps, "recomputes": r.drops, "spills": r.spills,
        "promotions": r.promotions, "requests": r.num_requests, "refused": r.refused}


def progress(point: Point, r: Result) -> str:
    return f"{point}: hits {r.hits:.3f}, time to first token {shown(percentile(r.ttft_s, 50), '.2f')} s"


def of_grid(trace: Trace, planned: Planned, rates: Rates, done: Sequence[tuple[Point, Result]],
            scale: float, fleet: int | None = None) -> str:
    """A table with a line for each grid point, and the knee."""
    largest = max(r.largest_hits for _, r in done)
    lines = [of_trace(trace, largest) + (f"\nlengths are divided by {scale:g}" if scale != 1 else ""),
             f"{rates.name}: {show_bytes(planned.weight_bytes >> 20 << 20)} of weights, "
             f"{planned.core.rows} requests at once, {planned.core.step_tokens:,} tokens a step" + (
                 f"; estimates, not measured: {', '.join(rates.estimated)}" if rates.estimated else ""), ""]
    tiers = TIERS[:3 if any(point.storage for point, _ in done) else 2]
    rows = []
    for point, r in done:
        n = numbers(r)
        rows.append([str(point), f"{n['hits']:.3f}", " ".join(f"{n[f'hits_{tier}']:.2f}" for tier in tiers),
                     f"{shown(n['ttft_p50_ms'] / 1e3, '.2f')} {shown(n['ttft_p95_ms'] / 1e3, '.1f')}",
                     f"{shown(n['itl_p50_ms'], '.1f')} {shown(n['itl_p95_ms'], '.1f')}", f"{n['output_tokens_s']:.0f}",
                     f"{n['gpu_busy']:.2f}", f"{n['load_busy']:.2f} {n['save_busy']:.2f}",
                     f"{r.swaps} {r.drops} {r.spills}"])
    head = ("grid point", "hits", "by tier", "TTFT s", "ITL ms", "tokens/s", "GPU", "link", "preempted")
    lines += [table(head, rows),
              f"by tier: {', '.join(tiers)}; TTFT, ITL: p50 p95; GPU, link (from host, to host): share of time in use; "
              "preempted: swapped, recomputed, spilled"]
    most = max(point.engines for point, _ in done)
    return "\n".join([*lines, *(knees([pair for pair in done if pair[0].engines == most] if fleet else done)),
                      *(fleets(done, fleet) if fleet else ())])


def refusals(engines: Sequence[Planned], done: Sequence[tuple[Point, Result]]) -> list[str]:
    """What was refused, by which limit, and the flags that set it; points with the same numbers share a line.
    `engines`: of each point, not divided by the scale."""
    points: dict[str, list[Point]] = {}
    for planned, (point, r) in zip(engines, done, strict=True):
        holds = planned.core.max_len            # the context length, or less where the pools hold less
        long = [n for n in r.refused_tokens if n >= planned.context or holds == planned.context]
        where = f"requests refused: the longest prompt has {max(r.refused_tokens, default=0):,} tokens"
        if long:
            points.setdefault(
                f"{len(long):,} of {r.num_requests:,} {where}, the context length is {planned.context:,} "
                "(--max-model-len; beyond the model's: --hf-overrides '{\"max_position_embeddings\": N}')",
                []).append(point)
        if r.refused > len(long):
            host = "; --kv-offloading-size, or host" if planned.core.sparse else ""
            points.setdefault(
                f"{r.refused - len(long):,} of {r.num_requests:,} {where}, the KV pools hold {holds:,} "
                f"(--kv-cache-memory-bytes, or device in --grid{host})", []).append(point)
    return [text if len(some) == len(done) else f"{', '.join(map(str, some))}: {text}" for text, some in points.items()]


def fleets(done: Sequence[tuple[Point, Result]], fleet: int) -> list[str]:
    """For each point: the fleet's numbers from the most engines that were simulated, and how far fewer differ."""
    lines = []
    for one in _series(done, "engines"):
        numbers_of = [(point.engines, numbers(r)) for point, r in one]
        num, most = numbers_of[-1]
        away = [f"with {n} hits differ by {abs(few['hits'] - most['hits']):.3f}, TTFT p50 by "
                f"{shown(_apart(few, most, 'ttft_p50_ms'), '.0%')}, tokens/s by "
                f"{_apart(few, most, 'output_tokens_s', num / n):.0%}"
                for n, few in numbers_of[:-1]] or ["simulate half as many, too, to see whether these are enough"]
        lines.append(f"{fleet:,} engines, from {num}: hits {most['hits']:.3f}, "
                     f"{most['output_tokens_s'] * fleet / num:,.0f} tokens/s; {'; '.join(away)}")
    return lines


def _apart(few: dict[str, float], most: dict[str, float], name: str, times: float = 1.0) -> float:
    return abs(few[name] * times / max(1e-9, most[name]) - 1)


def _series(done: Sequence[tuple[Point, Result]], key: str) -> list[list[tuple[Point, Result]]]:
    """Points that differ in this key only, by its value."""
    series: dict[tuple[object, ...], list[tuple[Point, Result]]] = {}
    for point, r in done:
        series.setdefault(tuple(getattr(point, name) for name in Point.__slots__ if name != key), []).append((point, r))
    return [sorted(one, key=lambda pair: getattr(pair[0], key) or 0) for one in series.values()]


def knees(done: Sequence[tuple[Point, Result]]) -> list[str]:
    """For each series of sizes of one tier: the least size whose hit rate is within KNEE of the largest one's."""
    found = []
    for key in TIERS:
        for one in _series(done, key):
            if len(one) < 2:
                continue
            point, r = next(pair for pair in one if pair[1].hits >= one[-1][1].hits - KNEE)
            where = "the largest tried: more may help" if point == one[-1][0] else f"{r.hits:.3f} of the prompt tokens"
            found.append(f"knee: {point} ({where})")
    return found


def plain(trace: Trace, rates: Rates, done: Sequence[tuple[Point, Result]], scale: float, fleet: int | None,
          routing: str) -> dict[str, Any]:
    """All of it for a JSON file."""
    return {"trace": trace.name, "rates": rates.name, "estimated": list(rates.estimated), "scale": scale,
            "fleet": fleet, "routing": routing,
            "points": [{"point": {name: getattr(point, name) for name in Point.__slots__}, **numbers(r)}
                       for point, r in done]}
