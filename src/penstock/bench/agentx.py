"""`penstock bench agentx`: sessions of coding agents on a running server, and how much of the cache they find.

The traces are those of `penstock plan`. Sessions are closed loops: a turn is the prompt before it, the server's answer
and what a tool adds. A server is anything with OpenAI's completions that streams.
"""
from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.bench.load import Answer, send
from penstock.bench.report import check_output, optional, percentile, shown, table, write_json
from penstock.config.base.errors import ConfigError
from penstock.eval.ask import Server
from penstock.plan.main import PAGE_TOKENS, add_source, trace_of
from penstock.plan.trace import Conversation, Seen, Session, Span, Text, Trace

# Of about one token each, with the space before.
WORDS = ("time year people way day man thing woman life child world school state family student group country problem "
         "hand part place case week company system program question work government number night point home water room "
         "mother area money story fact month lot right study book eye job word business issue side kind head house "
         "service friend father power hour game line end member law car city").split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bench agentx")
    group.add_argument("--base-url", required=True, help="the server, e.g. http://127.0.0.1:8000")
    group.add_argument("--bearer", help="API key that is sent to the server")
    add_source(group)
    group.add_argument("--scale", type=float, default=1.0, metavar="X",
                       help="divide lengths and the time of tools by this")
    group.add_argument("--text", action="store_true", help="send prompts as text; without it as random token ids")
    group.add_argument("--token-id-max", type=int, default=1_000, metavar="N", help="token ids are below this")
    group.add_argument("--session-retain-s", type=int, metavar="S", help="sessions of several turns ask penstock to be "
                       "retained for S seconds, and end with their last answer")
    group.add_argument("--output-json", metavar="FILE", help="file for every single measurement")
    group.add_argument("--quiet", action="store_true", help="no progress bar; a file never gets one")


def run(config: None, args: argparse.Namespace) -> int:
    """Return 1 if a request has failed. Raises ConfigError."""
    if args.token_id_max < 1:
        raise ConfigError(f"--token-id-max is {args.token_id_max}: at least 1")
    trace = trace_of(args)
    check_output("--output-json", args.output_json)
    return asyncio.run(measure(trace, args))


async def measure(trace: Trace, args: argparse.Namespace) -> int:
    async with Server(args.base_url, args.bearer) as server:
        bar = optional("tqdm").tqdm(total=trace.num_turns, unit="request", disable=args.quiet or None)
        text = Text(len(WORDS) if args.text else args.token_id_max)
        played = Played(server, text, Seen(1 if args.text else PAGE_TOKENS), args, bar)
        begin = time.perf_counter()
        await asyncio.gather(*(played.session(n, session) for n, session in enumerate(trace.sessions)))
        took = time.perf_counter() - begin
        bar.close()
    return report(trace, played, took, args)


@dataclass(slots=True)
class Played:
    server: Server
    text: Text
    seen: Seen                          # of words, if prompts are text
    args: argparse.Namespace
    bar: object
    answers: list[Answer] = field(default_factory=list)

    async def session(self, number: int, session: Session) -> None:
        """All turns, one after the other; it ends with one that fails."""
        talk, words, name, more = Conversation(self.text), list[str](), f"agentx-{number}", dict[str, object]()
        if self.args.session_retain_s is not None and len(session.turns) > 1:
            more = {"session_id": name, "session_retain_s": self.args.session_retain_s}
        await asyncio.sleep(session.start_s / self.args.scale)
        for n, turn in enumerate(session.turns):
            await asyncio.sleep(turn.pause_s / self.args.scale)
            before = len(talk.tokens) if turn.continues else 0
            prompt = talk.arrive(turn)
            words = words[:before] + [WORDS[token] for token in prompt[before:]] if self.args.text else []
            self.seen.prompt(talk)
            answer = await send(self.server, " ".join(words) if words else list(prompt), turn.output, ids=not words,
                                more=more)
            self.answers.append(answer)
            self.bar.update()           # type: ignore[attr-defined]  # of tqdm
            if answer.error:
                return
            if words:                   # the answer counts as one word that no other answer has
                words.append(answer.text.strip())
                talk.answer([-1 - number * len(session.turns) - n])
            else:
                # A server that shows no ids gets others in their place, which it has not computed.
                shown = len(answer.tokens) == turn.output
                talk.answer(answer.tokens if shown else self.text.answer(Span(f"answer {number} {n}", turn.output)))
                if not shown:
                    continue
            self.seen.answered(talk)
        if more:
            await self.server.client.post(f"/v1/sessions/{name}", json={"end": True})


def report(trace: Trace, played: Played, took: float, args: argparse.Namespace) -> int:
    good = [a for a in played.answers if not a.error]
    prompts, cached = sum(a.prompt_tokens for a in good), sum(a.cached_tokens for a in good)
    out, hits, possible = sum(a.output_tokens for a in good), cached / max(1, prompts), played.seen.share
    failed = len(played.answers) - len(good)
    series: dict[str, Sequence[float]] = {"time to first token": [a.ttft for a in good],
                                          "inter-token latency": [gap for a in good for gap in a.gaps]}
    print(f"\n{trace.name}: {len(good):,} requests, {failed} failed, {took:.1f} s, {out / took:.1f} output tokens/s, "
          f"{prompts / took:.0f} prompt tokens/s\n"
          f"hits: {hits:.3f} of {prompts:,} prompt tokens; {possible:.3f} is possible; "
          f"realised / theoretical {hits / possible if possible else 1:.3f}\n")
    print(table(("milliseconds", "p50", "p95", "max"), [
        (name, *(shown(1e3 * percentile(values, p), ".1f") for p in (50, 95, 100)))
        for name, values in series.items()]))
    for error in sorted({a.error for a in played.answers if a.error})[:5]:
        print(f"failed: {error}")
    if args.output_json:
        write_json(args.output_json, {"trace": trace.name, "seconds": took, "failed": failed, "hits": hits,
                                      "hits_largest": possible, "output_tokens": out, "prompt_tokens": prompts,
                                      "series": series})
    return int(failed > 0)
