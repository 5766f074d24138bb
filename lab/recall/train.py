"""Trains the recall model: one GPU, minutes, seeded, resumable from a folder that it wrote.

    PYTHONPATH=src python lab/recall/train.py OUT [--seconds 540] [--resume FOLDER] [--seed 0] [--hybrid]

Three stages: the model without its indexer ("dense", the length doubled from 128 to 4,096 as soon as it
recalls), the indexer alone ("warm", KL to the summed attention), both with the chosen tokens only ("joint").
Writes into OUT

    model.safetensors    bfloat16, what is shipped     rest.safetensors  what rounding took away, for resuming
    config.json, tokenizer.json                        log.json          losses, accuracies, the stage
    results.md           accuracy by length and by tokens chosen, of the rounded weights

With --hybrid the model of `hybrid.py`, which has no indexer and so one stage, and learns recall alone, of
all lengths from the first batch on, half of them with filler between the pairs. It stops as soon as it
recalls .99 of each. What was learnt is written at SIGTERM too.
Resuming continues the stage that the log names; Adam's moments start anew.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import data
import hybrid
import net
from steps import Captured

from penstock.eval import words

STARTED = time.time()
LONGEST = 4096
TOPK = (32, 64, 128, 256, 256)  # of the joint stage, drawn step by step; 256 is what is shipped
SHARES = {"dense": 0.56, "warm": 0.68, "joint": 0.93}  # of the time limit, when each stage ends
LATE = {"dense": 0.74, "warm": 0.8, "joint": 0.93}  # the same where the full length was reached late
HELD_OUT = 1 << 40  # batch numbers from here on are never trained on


def tokenizer_json() -> str:
    """A `tokenizer.json`: one id a word, split at blanks."""
    vocab = {word: i for i, word in enumerate(words.words())}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        }
    )


class Run:
    """One training run: model, where it stands, and the time that is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, Path(args.out)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(args.seed)
        self.net = hybrid if args.hybrid else net
        self.model = self.net.Recall().to(self.device)
        if args.hybrid:
            # Of states and what is within a chunk: all else is in bfloat16.
            torch.set_float32_matmul_precision("high")
        self.kinds = ("recall",) if args.hybrid else ("recall", "chain", "copy")
        self.state = {
            "stage": "dense",
            "tokens": args.longest if args.hybrid else 128,
            "batch": 0,
            "steps": {"dense": 0, "warm": 0, "joint": 0},
        }
        self.log: list[dict] = []
        self.late = False
        self.graphs, self.pool = args.graphs and self.device == "cuda", None
        if args.resume:
            self.load(Path(args.resume))

    def left(self, share: float) -> float:
        return STARTED + self.args.seconds * share - time.time()

    def stage_left(self, name: str) -> float:
        """Seconds until the stage ends. Induction comes when it comes: the stages behind can be shorter."""
        if self.args.hybrid:
            return self.left(SHARES["joint"])
        if self.state["tokens"] < self.args.longest and self.left(0.4) < 0:
            self.late = True
        return self.left((LATE if self.late else SHARES)[name])

    def say(self, **what: object) -> None:
        entry = {"t": round(time.time() - STARTED, 1), **what}
        self.log.append(entry)
        print(json.dumps(entry), flush=True)

    # ------------------------------------------------------------ folder
    def load(self, folder: Path) -> None:
        rounded, rest = load_file(folder / "model.safetensors"), load_file(folder / "rest.safetensors")
        self.model.load_state_dict({n: t.float() + rest[n].float() for n, t in rounded.items()})
        before = json.loads((folder / "log.json").read_text())
        self.state = before["state"]
        self.log = before["log"]
        if self.state["tokens"] < self.args.longest:
            self.state["stage"] = "dense"
        self.say(resumed=str(folder), **self.state)

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        exact = {n: t.detach().float().cpu().contiguous() for n, t in self.model.state_dict().items()}
        rounded = {n: t.bfloat16() for n, t in exact.items()}
        save_file(rounded, self.out / "model.safetensors", {"format": "pt"})
        rest = {n: (t - rounded[n].float()).bfloat16() for n, t in exact.items()}
        save_file(rest, self.out / "rest.safetensors", {"format": "pt"})
        (self.out / "config.json").write_text(json.dumps(self.net.CONFIG, indent=1) + "\n")
        (self.out / "tokenizer.json").write_text(tokenizer_json())
        self.save_log()

    def save_log(self) -> None:
        (self.out / "log.json").write_text(json.dumps({"state": self.state, "log": self.log}))

    # ------------------------------------------------------------ measuring
    @torch.no_grad()
    def accuracy(
        self, kind: str, tokens: int, mode: str, topk: int, *, spread: bool, rows: int = 16
    ) -> float:
        """Share of questions with every answer token right; of answer tokens for "copy" and "sum"."""
        self.model.eval()
        right = asked = 0
        # The hybrid's always of one size, as its batches are: what is compiled is of one shape.
        at_once = max(1, self.args.batch_tokens // tokens if self.args.hybrid else min(rows, 32768 // tokens))
        n = data.asked(tokens) if self.args.hybrid and spread else None
        for number in range(-(-rows // at_once)):
            gen, dice = data.generator(self.args.seed, HELD_OUT + number, self.device)
            if kind == "copy":
                ids, labels = data.copying(at_once, tokens, gen)
            else:
                hops = 2 if kind == "chain" else 1
                ids, labels = data.pairs(at_once, tokens, gen, dice, kind, spread=spread, hops=hops, n=n)
            how = net.How(mode, tokens, topk, ids.device)
            with torch.autocast(self.device, torch.bfloat16):
                ok = self.model(ids, how)[0].argmax(-1) == labels
            where = labels[0] != data.IGNORED
            ok = ok[:, where].view(at_once, -1, 2).all(-1) if kind == "chain" else ok[:, where]
            right, asked = right + int(ok.sum()), asked + ok.numel()
        self.model.train()
        return round(right / asked, 4)

    def accuracies(self, tokens: int, mode: str, topk: int, rows: int = 16) -> dict[str, float]:
        kinds = [*self.kinds, *(["sum"] if tokens >= 512 and len(self.kinds) > 1 else [])]
        found = {k: self.accuracy(k, tokens, mode, topk, spread=False, rows=rows) for k in kinds}
        if tokens >= 256:
            for kind in self.kinds[:2]:
                found[kind + " spread"] = self.accuracy(kind, tokens, mode, topk, spread=True, rows=rows)
        return found

    # ------------------------------------------------------------ training
    def optimizer(
        self, groups: list[list[torch.nn.Parameter]], betas: tuple[float, float]
    ) -> torch.optim.AdamW:
        cuda = self.device == "cuda"
        rate = torch.tensor(0.0, device=self.device) if cuda else 0.0
        chosen = [p for group in groups for p in group]
        return torch.optim.AdamW(chosen, lr=rate, betas=betas, weight_decay=0.01, fused=cuda, capturable=cuda)

    def stage(self, name: str, lr: float, rows_of: dict[int, int], every: int) -> None:
        """Trains until the stage's share of the time is over. rows_of: sequences a batch for each length."""
        main, index = self.model.parts()
        betas = (0.9, 0.98) if name == "dense" else (0.9, 0.95)
        opt = self.optimizer({"dense": [main], "warm": [index], "joint": [main, index]}[name], betas)
        params = opt.param_groups[0]["params"]
        self.state["stage"] = name
        # Graphs of one stage share their memory: they run one after the other.
        several = name == "joint" or self.args.hybrid
        self.pool = torch.cuda.graph_pool_handle() if self.graphs and several else None
        steps: dict[tuple[int, int], Step] = {}
        whole, first = max(1.0, self.stage_left(name)), self.state["steps"][name]
        saved = measured = time.time()
        while self.stage_left(name) > 0 and self.state["steps"][name] - first < self.args.steps:
            done = self.state["steps"][name] - first
            number = self.state["batch"]
            tokens, made = self.lesson(rows_of, number)
            topk = TOPK[number % len(TOPK)] if name == "joint" else 0
            # A warm-up, then constant; over the last third of the last stage down to a tenth.
            fall = min(1.0, 3 * self.stage_left(name) / whole) if several else 1.0
            rise = min(1.0, (done + 1) / (50 if self.args.hybrid else 200))
            self.set_rate(opt, lr * rise * max(0.1, fall))
            if (tokens, topk) not in steps:
                if name == "dense" and not self.args.hybrid:
                    steps.clear()  # a shorter length never comes back
                    opt.zero_grad(set_to_none=True)
                steps[tokens, topk] = Step(self, name, opt, params, rows_of[tokens], tokens, topk)
            loss, kl = steps[tokens, topk](*made)
            self.state["batch"] += 1
            self.state["steps"][name] += 1
            if self.args.hybrid and time.time() - measured > self.args.measure:
                if self.enough(float(loss)):
                    break
                measured = time.time()
            elif not self.args.hybrid and (done + 1) % every == 0:
                self.check(name, self.state["tokens"], float(loss), float(kl))
            if time.time() - saved > 60:
                self.save()
                saved = time.time()
        steps.clear()

    def lesson(self, rows_of: dict[int, int], number: int) -> tuple[int, tuple[Tensor, Tensor]]:
        """Batch `number` and its length."""
        seed, tokens = self.args.seed, self.state["tokens"]
        if not self.args.hybrid:
            return tokens, data.batch(rows_of[tokens], tokens, seed, number, self.device)
        gen, dice = data.generator(seed, number, self.device)
        tokens, n, spread = data.recall_alone(tokens, dice)
        return tokens, data.pairs(rows_of[tokens], tokens, gen, dice, "recall", spread=spread, n=n)

    def enough(self, loss: float) -> bool:
        """Says how much is recalled of each length, and whether that is all that is asked for."""
        lengths = [self.args.longest >> i for i in (2, 1, 0)]
        found = {
            t: [self.accuracy("recall", t, "dense", 0, spread=spread, rows=4) for spread in (False, True)]
            for t in lengths
        }
        self.say(step=self.state["steps"]["dense"], loss=round(loss, 4), recall=found)
        return all(min(shares) >= 0.99 for shares in found.values())

    @staticmethod
    def set_rate(opt: torch.optim.Optimizer, rate: float) -> None:
        for group in opt.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def check(self, name: str, tokens: int, loss: float, kl: float) -> None:
        """Measures, logs, and doubles the length once the model recalls at this one."""
        mode, topk = ("joint", 256) if name == "joint" else ("dense", 0)
        found = {k: self.accuracy(k, tokens, mode, topk, spread=False) for k in self.kinds}
        step = self.state["steps"][name]
        self.say(stage=name, step=step, tokens=tokens, loss=round(loss, 4), kl=round(kl, 4), **found)
        learned = found["recall"] > 0.9 and found["chain"] > 0.75
        if name == "dense" and learned and tokens < self.args.longest:
            self.state["tokens"] = 2 * tokens


class Step:
    """One training step of fixed shape."""

    def __init__(
        self, run: Run, mode: str, opt: torch.optim.Optimizer, params: list, rows: int, tokens: int, topk: int
    ) -> None:
        self.run, self.mode, self.opt, self.params, self.tokens = run, mode, opt, params, tokens
        # The indexer learns at an eighth of the positions of a batch: its loss is the costly part.
        sampled = None if mode == "dense" else torch.zeros(tokens // 8, dtype=torch.long, device=run.device)
        self.how = net.How(mode, tokens, topk, torch.device(run.device), sampled)
        self.ids = torch.zeros(rows, tokens, dtype=torch.long, device=run.device)
        self.labels = self.ids.clone()
        self.step = Captured(self.work, opt, run.pool, eager=not run.graphs)

    def work(self) -> tuple[Tensor, Tensor]:
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast(self.run.device, torch.bfloat16, cache_enabled=not self.run.graphs):
            logits, kl = self.run.model(self.ids, self.how)
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), self.labels.flatten(), ignore_index=data.IGNORED
            )
        (kl if self.mode == "warm" else loss + kl if self.mode == "joint" else loss).backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.opt.step()
        return loss.detach(), kl.detach()

    def __call__(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        self.ids.copy_(ids)
        self.labels.copy_(labels)
        if self.how.rows_R is not None:
            rows = torch.randperm(self.tokens, device=self.run.device)[: len(self.how.rows_R)]
            self.how.rows_R.copy_(rows)
        found = self.step()
        if self.step.why and self.run.graphs:
            self.run.graphs = False
            self.run.say(note="no CUDA graphs from here on", reason=self.step.why)
        return found


def results(run: Run) -> str:
    """The table of the rounded weights; the same figures go into the log."""
    exact = run.model.state_dict()
    run.model.load_state_dict({n: t.bfloat16().float() for n, t in exact.items()})
    lines = ["| tokens | chosen | recall | spread | two hops | spread | copy | sum |", "|---" * 8 + "|"]
    longest = run.args.longest
    asks = [(t, "dense", 0) for t in (longest, longest // 4, longest // 2, 2 * longest)]
    asks = asks if run.args.hybrid else [
        (longest, m, k)
        for m, k in (("joint", 256), ("joint", 128), ("joint", 32), ("shuffled", 256), ("dense", 0))
    ]
    if not run.args.hybrid:
        asks += [(t, "joint", 256) for t in (longest // 4, longest // 2, 2 * longest)]
        asks += [(longest, "joint", 64)]
    for tokens, mode, topk in asks:
        if run.left(0.99) < 0:
            run.say(note="no time for the rest of the table")
            break
        got = run.accuracies(tokens, mode, topk)
        run.say(result=mode, tokens=tokens, topk=topk, **got)
        what = {"joint": str(topk), "shuffled": f"{topk}, shuffled", "dense": "all"}[mode]
        order = ("recall", "recall spread", "chain", "chain spread", "copy", "sum")
        lines.append("| " + " | ".join([str(tokens), what, *(str(got.get(k, "")) for k in order)]) + " |")
        (run.out / "results.md").write_text("\n".join(lines) + "\n")
    run.model.load_state_dict(exact)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--resume")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens; shorter for a try on a CPU")
    parser.add_argument("--steps", type=int, default=1 << 30, help="at most so many steps a stage")
    parser.add_argument(
        "--batch-tokens", type=int, default=65536, help="tokens a dense batch; half with indexer"
    )
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--hybrid", action="store_true", help="the model of hybrid.py")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of the first stage")
    parser.add_argument("--measure", type=float, default=15, help="seconds between measures of the hybrid")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    run = Run(parser.parse_args())
    args = run.args
    run.say(
        device=run.device, torch=torch.__version__, parameters=sum(p.numel() for p in run.model.parameters())
    )
    lengths = [128 << i for i in range(10) if 128 << i <= args.longest]
    many = {t: max(1, args.batch_tokens // t) for t in lengths}
    few = {t: max(1, args.batch_tokens // 2 // t) for t in lengths}
    for name, lr, rows, every in (
        ("dense", args.rate, many, 200),
        ("warm", 1e-3, few, 100),
        ("joint", 3e-4, few, 100),
    ):
        if args.hybrid and name != "dense":
            continue
        if list(SHARES).index(run.state["stage"]) <= list(SHARES).index(name):
            try:
                run.stage(name, lr, rows, min(every, args.steps))
            finally:
                run.save()
    print(results(run))
    run.save_log()


if __name__ == "__main__":
    main()
