"""Two trees of this repository asked the same in turns: what `penstock bench demo` does, but shorter.

    python lab/bench/two_trees.py OTHER/src [ROUNDS]

Each is an engine process that waits while the other one works, on one thread; the order changes each round.
Prints, for each work, how fast this tree is against the other: by the clock (median and quartiles of pairs),
and by processor seconds, which other work on the machine changes less; and how many answers were equal.
"""
from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

HERE = Path(__file__).parents[2] / "src"
WORKS = {"decode, 1 stream": (1, 64, 32), "decode, 8 streams": (8, 64, 16), "prefill 512": (1, 512, 1),
         "the same again": (1, 512, 1)}                 # requests, prompt tokens, new tokens of each


async def serve() -> None:
    """One tree: a work and a seed a line, answered by seconds and tokens."""
    from penstock import AsyncLLM, SamplingParams
    async with AsyncLLM("demo", threads=1) as llm:
        async def once(prompt: list[int], new: int) -> list[int]:
            params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
            return [token async for delta in llm.stream({"prompt_token_ids": prompt}, params)
                    for token in delta.token_ids]

        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            work, seed = json.loads(line)
            requests, tokens, new = WORKS[work]
            rng = random.Random(f"{tokens} {seed}")     # "again" draws what the work before it drew
            prompts = [[rng.randrange(llm.vocab_size) for _ in range(tokens)] for _ in range(requests)]
            began = time.perf_counter()
            said = await asyncio.gather(*(once(prompt, new) for prompt in prompts))
            print(json.dumps([time.perf_counter() - began, said]), flush=True)


class Tree:
    def __init__(self, source: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"})
        assert self._line() == "ready\n", f"{source}: it does not start"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def processor_s(self) -> float:
        """Of the process and all that it has started."""
        parents, used = {}, {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:                             # it has ended
                continue
            pid = int(stat.parent.name)
            parents[pid], used[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
        ours = {self._process.pid}
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        return sum(used[pid] for pid in ours) / os.sysconf("SC_CLK_TCK")

    def ask(self, work: str, seed: int) -> tuple[float, float, list[list[int]]]:
        """Seconds, processor seconds, tokens."""
        assert self._process.stdin is not None
        before = self.processor_s()
        self._process.stdin.write(json.dumps([work, seed]) + "\n")
        self._process.stdin.flush()
        took, said = json.loads(self._line())
        return took, self.processor_s() - before, said

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(other: Path, rounds: int) -> None:
    trees = Tree(HERE), Tree(other)
    for tree in trees:
        for work in WORKS:
            tree.ask(work, -1)                          # warm
    pairs: dict[str, list[tuple[float, float]]] = {work: [] for work in WORKS}
    equal = 0
    for seed in range(rounds):
        for work, found in pairs.items():
            order = trees[::(-1) ** seed]
            ours, theirs = [tree.ask(work, seed) for tree in order][::(-1) ** seed]
            found.append((theirs[0] / ours[0], theirs[1] / max(ours[1], 0.01)))
            equal += ours[2] == theirs[2]
    for work, found in pairs.items():
        clock, processor = (sorted(column) for column in zip(*found, strict=True))
        low, _, high = quantiles(clock)
        print(f"{work}: {median(clock):.2f} ({low:.2f} to {high:.2f}), "
              f"by processor seconds {median(processor):.2f}")
    print(f"{equal} of {rounds * len(WORKS)} answers are equal")
    for tree in trees:
        tree.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 9)
    else:
        asyncio.run(serve())
