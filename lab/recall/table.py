"""How often the recall model answers right, by context length and by how many tokens a query reads.

    PYTHONPATH=src python lab/recall/table.py tests/data/recall [--contexts 1000,2000,4000,8000]

Questions are asked while decoding (`penstock eval --forced`), through an engine process, in float32; one
context a cell, of which a prompt is read once. A few minutes on a core.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from penstock.serve.client.llm import AsyncLLM

from penstock.bench.report import table
from penstock.eval import tasks
from penstock.eval.ask import Library, all_of
from penstock.eval.main import interval
from penstock.eval.tasks import Interview, Size


async def share(llm: AsyncLLM, task: str, context: int, args: argparse.Namespace) -> str:
    asker = Library(llm)
    size = Size(
        contexts=(context,),
        samples=args.samples,
        questions=args.questions,
        seed=1,
        tokens_of=lambda text: len(text.split()),
    )

    async def hold(interview: Interview) -> list[bool]:
        given = await asker.forced(llm.encode(interview.context), llm.encode(interview.dialogue))
        return [all(given[i].rank == 1 for i in places) for places in interview.answers]

    held = await all_of(hold, tasks.interviews(task, size), concurrency=2, unit="context", quiet=True)
    right, asked = sum(map(sum, held)), sum(map(len, held))
    low, high = interval(right, asked)
    return f"{100 * right / asked:.1f} ({100 * low:.0f} to {100 * high:.0f})"


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--contexts", default="1000,2000,4000,8000")
    parser.add_argument("--topk", default="16,32,64,256,16384")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--sparse-kv", choices=("off", "always"), default="off",
                        help="always: rows are read from host pages")
    args = parser.parse_args()
    source, host = Path(args.model), "500M" if args.sparse_kv == "always" else "0"
    contexts = [int(n) for n in args.contexts.split(",")]
    rows: dict[str, list[list[str]]] = {task: [] for task in ("recall", "tracking")}
    for topk in map(int, args.topk.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("model.safetensors", "tokenizer.json"):
                (Path(folder) / name).symlink_to((source / name).absolute())
            config = json.loads((source / "config.json").read_text())
            (Path(folder) / "config.json").write_text(json.dumps({**config, "index_topk": topk}))
            async with AsyncLLM(folder, hbm_bytes="100M", dram_bytes=host, max_model_len=12000,
                                dtype="float32", sparse_kv=args.sparse_kv) as llm:
                for task, found in rows.items():
                    cells = [await share(llm, task, context, args) for context in contexts]
                    found.append(["all" if topk >= 16384 else str(topk), *cells])
                    print(task, *found[-1], flush=True)
    for task, found in rows.items():
        print(f"\n{task}: % right (95 % interval)\n")
        print(table(["tokens read", *map(str, contexts)], found))


if __name__ == "__main__":
    asyncio.run(main())
