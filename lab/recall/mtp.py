"""Trains a layer that drafts (multi-token prediction) on the recall model, which stays as it is.

    PYTHONPATH=src python lab/recall/mtp.py FOLDER OUT [--seconds 140] [--seed 0] [--resume OUT]

FOLDER is the recall model's. Writes OUT/mtp.safetensors, in DeepSeek's names, in bfloat16, and log.json: of
what the model says where answers are known, how much the layer says one, two and three tokens ahead.

`B` rows, `T` tokens, `D` width
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import data
import net
from net import LATENT, NOPE, ROPE, D, N
from steps import Captured

DEPTH = 3  # drafts one behind the other that are trained for
TOPK = 256
ENOUGH = 0.98  # of every length at every depth: no need to go on
LENGTHS = (128, 256, 512, 1024, 2048)


class Draft(nn.Module):
    """Entry i is of the hidden state of token i - 1 and of token i. Deeper drafts ask with the layer's own
    hidden state, and read what true ones have left."""

    def __init__(self) -> None:
        super().__init__()
        self.enorm, self.hnorm = net.norm(D), net.norm(D)
        self.eh_proj = net.linear(2 * D, D)
        block = net.Block()
        del block.self_attn.indexer
        self.block = block
        self.shared_head = nn.ModuleDict({"norm": net.norm(D)})
        net.initialise(self)

    def joint(self, token_BTD: Tensor, hidden_BTD: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.enorm(token_BTD), self.hnorm(hidden_BTD)], -1))

    def layer(self, x: Tensor, read: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x asks, the rows are those of `read`."""
        at, block = self.block.self_attn, self.block
        q = at.q_b_proj(at.q_a_layernorm(at.q_a_proj(block.input_layernorm(x))))
        q = q.unflatten(-1, (N, NOPE + ROPE)).transpose(1, 2)
        q = torch.cat([q[..., :NOPE], net.turned(q[..., NOPE:], rope, True)], -1)
        both = at.kv_a_proj_with_mqa(block.input_layernorm(read))
        shared = net.turned(both[..., LATENT:].unsqueeze(1), rope, True)
        kv = at.kv_b_proj(at.kv_a_layernorm(both[..., :LATENT])).unflatten(-1, (N, 2 * NOPE)).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], shared.expand(-1, N, -1, -1)], -1)
        y = F.scaled_dot_product_attention(q, k, F.pad(kv[..., NOPE:], (0, ROPE)), is_causal=True)
        x = x + at.o_proj(y[..., :NOPE].transpose(1, 2).flatten(2))
        return self.shared_head["norm"](x + block.mlp(block.post_attention_layernorm(x)))

    def forward(self, token_BTD: Tensor, hidden_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Of each depth what the head reads, of tokens 1 and on."""
        token_BTD, hidden_BTD = token_BTD[:, 1:], hidden_BTD[:, :-1]
        read = x = self.joint(token_BTD, hidden_BTD)
        found = [self.layer(x, read, rope)]
        for _ in range(1, DEPTH):
            x = self.joint(token_BTD, torch.cat([hidden_BTD[:, :1], found[-1][:, :-1]], 1))
            found.append(self.layer(x, read, rope))
        return found


def name_of(name: str) -> str:
    """As DeepSeek's files have it."""
    return f"model.layers.4.{name.removeprefix('block.')}"


class Trained:
    def __init__(self, folder: str, seed: int, resume: str | None = None) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(seed)
        self.seed = seed
        self.model = net.Recall().to(self.device)
        known = load_file(Path(folder) / "model.safetensors")
        names = self.model.state_dict()
        self.model.load_state_dict({n: known[n].float() for n in names})
        self.model.requires_grad_(False).eval()
        self.draft = Draft().to(self.device)
        if resume:
            own = load_file(Path(resume) / "mtp.safetensors")
            self.draft.load_state_dict({n: own[name_of(n)].float() for n in self.draft.state_dict()})

    @torch.no_grad()
    def made(self, ids_BT: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings, hidden states behind the last norm, and what the model says."""
        how = net.How("joint" if tokens > TOPK else "dense", tokens, TOPK, ids_BT.device)
        model = self.model.model
        token = x = model["embed_tokens"](ids_BT)
        for block in model["layers"]:
            x, _ = block(x, how)
        x = model["norm"](x)
        return token, x, self.model.lm_head(x).argmax(-1)

    def batch(self, number: int, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Copies, and every third time hops."""
        gen, dice = data.generator(self.seed, number, self.device)
        if number % 3:
            return data.copying(rows, tokens, gen)
        hops = dice.choice((2, 3, 4))
        return data.pairs(rows, tokens, gen, dice, "chain", spread=False, hops=hops)

    def losses(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Over answers that are known, behind the first token of each. And at each depth the share that is
        said as the model says it."""
        tokens = ids.shape[1]
        with torch.autocast(self.device, torch.bfloat16, cache_enabled=False):
            token, hidden, said = self.made(ids, tokens)
            outs = self.draft(token, hidden, net.angles(tokens - 1, ids.device))
            logits = [F.linear(out, self.model.lm_head.weight).float() for out in outs]
        known = labels != data.IGNORED
        known = known[:, 1:] & known[:, :-1]
        want = said[:, 1:].masked_fill(~known, data.IGNORED)
        right = [(one.detach().argmax(-1) == want).sum() / known.sum() for one in logits]
        flat, ask = want.flatten(), data.IGNORED
        return sum(F.cross_entropy(one.flatten(0, 1), flat, ignore_index=ask) for one in logits), right

    def save(self, out: Path, log: list[dict]) -> None:
        found = {
            name_of(name): tensor.detach().bfloat16().cpu().contiguous()
            for name, tensor in self.draft.state_dict().items()
        }
        save_file(found, out / "mtp.safetensors", {"format": "pt"})
        (out / "log.json").write_text(json.dumps(log))


class Step:
    """One training step of one length."""

    def __init__(self, run: Trained, opt: torch.optim.Optimizer, rows: int, tokens: int, pool: object):
        self.run, self.opt = run, opt
        self.ids = torch.zeros(rows, tokens, dtype=torch.long, device=run.device)
        self.labels = self.ids.clone()
        self.step = Captured(self.work, opt, pool, eager=run.device != "cuda")

    def work(self) -> tuple[Tensor]:
        self.opt.zero_grad(set_to_none=True)
        loss, right = self.run.losses(self.ids, self.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.run.draft.parameters(), 1.0)
        self.opt.step()
        return (torch.stack(right),)

    def __call__(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The share that is right at each depth, [DEPTH]."""
        self.ids.copy_(ids)
        self.labels.copy_(labels)
        (right,) = self.step()
        return right


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", help="a folder that this has written")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    args = parser.parse_args()
    started, out = time.time(), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    run, log, number = Trained(args.folder, args.seed, args.resume), list[dict](), 0
    saved = said = started
    cuda = run.device == "cuda"
    opt = torch.optim.AdamW(
        run.draft.parameters(),
        lr=torch.tensor(0.0, device=run.device),
        betas=(0.9, 0.98),
        weight_decay=0.01,
        fused=cuda,
        capturable=cuda,
    )
    pool, steps = torch.cuda.graph_pool_handle() if cuda else None, dict[int, Step]()
    lengths, short = [n for n in LENGTHS if n <= args.longest], args.resume is None
    dice = random.Random(args.seed)
    mean = {n: torch.zeros(DEPTH, device=run.device) for n in LENGTHS}
    while (spent := (time.time() - started) / args.seconds) < 1:
        rate = args.rate * min(1.0, (number + 1) / 100) * max(0.05, min(1.0, 2 * (1 - spent)))
        opt.param_groups[0]["lr"].fill_(rate)
        tokens = lengths[0] if short else dice.choice(lengths)
        if tokens not in steps:
            steps[tokens] = Step(run, opt, args.batch_tokens // tokens, tokens, pool)
        batch = run.batch(number + (1 << 30) * bool(args.resume), args.batch_tokens // tokens, tokens)
        mean[tokens].mul_(0.9).add_(steps[tokens](*batch), alpha=0.1)
        number += 1
        if number % 100 == 0:
            # The shortest alone until copying has been learnt.
            short = short and float(mean[lengths[0]][0]) < 0.8 and spent < 0.5
        if time.time() - said > 10:
            shares = {n: [round(m, 3) for m in many.tolist()] for n, many in mean.items()}
            log.append({"t": round(time.time() - started, 1), "step": number, "right": shares})
            print(json.dumps(log[-1]), flush=True)
            said = time.time()
            if all(min(many) >= ENOUGH for many in shares.values()):
                break
        if time.time() - saved > 25:
            run.save(out, log)
            saved = time.time()
    run.save(out, log)


if __name__ == "__main__":
    main()
