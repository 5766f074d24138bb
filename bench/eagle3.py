"""Makes a layer that drafts for the demo model, as EAGLE-3, out of the model's own greedy answers.

    PYTHONPATH=src python bench/eagle3.py OUT [--prompts 16384] [--asking 60] [--seconds 100] [--seed 0]

OUT: answers.json (taken if it is there), model.safetensors (bfloat16), config.json. Chats are about this
repository, those held out about other passages; the model stays as it is. Prints which drafts are accepted
of answers that were learnt and that were not, by what is here, then by the engine, which should say the
same, with fewer drafts where an answer nears its longest, as steps are planned ahead. Needs transformers,
and a GPU or time.

`B` rows, `T` tokens, `E` entries of the layer, one for each token but the first, `D` width, `W` words of
its head, `M` entries that draft
"""

import argparse
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from penstock import LLM, SamplingParams
from penstock.model.weights.checkpoint import open_checkpoint
from penstock.model.weights.locate import locate

ROOT = Path(__file__).parents[1]
DEPTH = 3  # drafts one behind the other that are trained for
DECAY = 0.8  # of what each further one weighs
WORDS = 8192
HELD_OUT = 32
MEASURED = 32  # answers of each kind, at most, one by one: rows do not draft beside prompts
OF_TEXTS = """Summarise this text in two sentences. Summarise this as bullet points. Shorten this.
Explain this to a beginner. Explain this step by step. What is this about? Continue this text.
Give this a title. Rewrite this in simpler words. Rewrite this more formally. Rewrite this as a short story.
Repeat this text word for word. Correct the spelling and grammar of this. Which questions does this answer?
Ask a question about this and answer it. List the most important words here and explain them.
Criticise this. Translate this into French. What could go wrong here? Write an email about this. Is this true?
Say the opposite. Write Python code that has to do with this. Turn this into a table. Who should read this?"""
OF_NAMES = """What is {}? Explain {} in a few sentences. Why would somebody need {}? Tell a story about {}.
Write a Python function {} with a docstring. Write a Python class for {} with four methods. Who uses {}?
List five facts about {}. How do I learn about {}? Write a short poem about {}. Give me advice on {}."""
Chat = tuple[list[int], list[int]]  # token ids of the prompt, and of the answer with its end


def chats(held_out: bool, seed: int) -> Iterator[str]:
    """Without end: about passages of documents and sources, and about names of chapters, functions and
    classes. None of `penstock bench`, which asks questions of its own."""
    dice, passages, names = random.Random(seed), list[str](), set[str]()
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")]):
        if ROOT / "src/penstock/bench" not in path.parents:
            text = path.read_text(encoding="utf-8")
            passages += re.findall(r"(?s)\S.{300,900}?(?=\n\n|$)", text)
            names |= {*re.findall(r"(?m)^(?:#+|def|class) (\w[\w ]+)", text)}
    dice.shuffle(passages)
    abouts = [[part[i] for i in range(len(part)) if (i % HELD_OUT == 0) == held_out]
              for part in (passages, sorted(names))]
    kinds = [re.findall(r"\S.*?[.?](?=\s|$)", text) for text in (OF_TEXTS, OF_NAMES)]
    while True:
        named = dice.random() < 0.3
        kind, about = dice.choice(kinds[named]), dice.choice(abouts[named])
        yield kind.format(about.replace("_", " ").strip()) if named else f"{kind}\n\n{about}"


def answered(args: argparse.Namespace) -> dict[str, Any]:
    """By an engine: what is held out first, then as many as there is time for."""
    found: dict[str, Any] = {"new": args.new, "held": [], "learnt": []}
    with LLM("demo", device=args.device, max_model_len=2048, max_num_seqs=args.rows) as llm:
        started = time.time()
        for kind, most in (("held", min(MEASURED, args.prompts // 2)), ("learnt", args.prompts)):
            asked, some = chats(kind == "held", args.seed), found[kind]
            while len(some) < most and (not some or time.time() - started < args.asking):
                said = llm.chat([[{"role": "user", "content": one}] for one in islice(asked, min(
                    most - len(some), 4 * args.rows))], greedy(args.new))
                some += [(one.prompt_token_ids, one.outputs[0].token_ids) for one in said]
            tokens, took = sum(len(answer) for _, answer in some), time.time() - started
            print(f"{len(some)} answers, {kind}, {tokens} tokens, after {took:.0f} s", flush=True)
    return found


def greedy(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0.0)


class Eagle(nn.Module):
    """Entry i is of the hidden state before token i and of token i. Deeper drafts ask with the layer's own
    hidden state and read what such ones have left, behind what true ones have."""

    def __init__(self, config: LlamaConfig, words_W: Tensor) -> None:
        super().__init__()
        width, self.size = config.hidden_size, config.head_dim
        q, kv = (n * self.size for n in (config.num_attention_heads, config.num_key_value_heads))
        sizes = {"q": (2 * width, q), "k": (2 * width, kv), "v": (2 * width, kv), "o": (q, width)}
        norms = {name: nn.RMSNorm(width, config.rms_norm_eps) for name in (
            "input_layernorm", "hidden_norm", "post_attention_layernorm")}
        at = nn.ModuleDict({f"{name}_proj": nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.midlayer = nn.ModuleDict({"self_attn": at, "mlp": LlamaMLP(config), **norms})
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(words_W), bias=False)
        self.register_buffer("d2t", words_W - torch.arange(len(words_W)))

    def forward(self, token_BED: Tensor, tapped_BED: Tensor, rope: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
        """Of each depth what the last norm reads. tapped_BED: three times as wide."""
        mid, x, keys, values = self.midlayer, self.fc(tapped_BED).float(), list[Tensor](), list[Tensor]()
        at, entry_E = mid["self_attn"], torch.arange(x.shape[1], device=x.device)
        ago_EE = entry_E[:, None] - entry_E
        for depth in range(DEPTH):
            both = torch.cat([mid["input_layernorm"](token_BED), mid["hidden_norm"](x)], -1)
            q, k, v = (at[f"{name}_proj"](both).unflatten(-1, (-1, self.size)).transpose(1, 2)
                       for name in "qkv")
            q, k = (turned.to(v.dtype) for turned in apply_rotary_pos_emb(q, k, *rope))
            keys.append(k.repeat_interleave(q.shape[1] // k.shape[1], 1))
            values.append(v.repeat_interleave(q.shape[1] // v.shape[1], 1))
            seen = torch.cat([ago_EE >= depth, *(ago_EE == depth - own for own in range(1, depth + 1))], 1)
            y = F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), seen)
            x = x + at["o_proj"](y.transpose(1, 2).flatten(2))
            x = x + mid["mlp"](mid["post_attention_layernorm"](x))
            yield x
            x = torch.cat([x[:, :1], x[:, :-1]], 1)


def batches(chats: Sequence[Chat], tokens: int) -> list[list[Chat]]:
    """Chats of about one length together."""
    found = list[list[Chat]]()
    for chat in sorted(chats, key=lambda chat: len(chat[0]) + len(chat[1])):
        if not found or (len(found[-1]) + 1) * (len(chat[0]) + len(chat[1])) > tokens:
            found.append([])
        found[-1].append(chat)
    return found


class Trained:
    def __init__(self, device: str, learnt: Sequence[Chat]) -> None:
        checkpoint = open_checkpoint(locate("demo"))
        self.device, self.cuda, self.config = device, device == "cuda", LlamaConfig(**checkpoint.config)
        self.model = LlamaForCausalLM(self.config)
        self.model.load_state_dict(dict(checkpoint.tensors()), strict=False)
        self.model.tie_weights()
        self.model.to(device, torch.bfloat16 if self.cuda else torch.float32).requires_grad_(False).eval()
        last, vocab = self.config.num_hidden_layers, self.config.vocab_size
        self.taps = [2, last // 2, last - 3]  # before these layers
        said = torch.tensor([token for _, answer in learnt for token in answer])
        words_W = said.bincount(minlength=vocab).sort(descending=True, stable=True)[1][:WORDS].sort()[0]
        self.own_V = torch.full((vocab,), -1).index_put((words_W,), torch.arange(WORDS)).to(device)
        self.eagle = Eagle(self.config, words_W).to(device)
        self.head_WD = self.model.lm_head.weight[words_W.to(device)]
        self.eagle.lm_head.weight.data.copy_(self.head_WD)
        self.eagle.norm.weight.data.copy_(self.model.model.norm.weight)

    @torch.no_grad()
    def read(self, batch: Sequence[Chat]) -> tuple[Tensor, ...]:
        """What `drafts` takes and training does not change: ids, what the three layers are given in front of
        them, what is behind the model's last norm, where first drafts are, which word follows (-1: none)."""
        ids_BT = torch.zeros(len(batch), max(len(prompt) + len(answer) for prompt, answer in batch)).long()
        first_BE = torch.zeros(len(batch), ids_BT.shape[1] - 1, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(batch):
            ids_BT[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            first_BE[row, len(prompt) - 1 : len(prompt) + len(answer) - 2] = True
        ids_BT, first_BE = ids_BT.to(self.device), first_BE.to(self.device)
        out = self.model.model(ids_BT, output_hidden_states=True, use_cache=False)
        tapped_BED = torch.cat([out.hidden_states[layer][:, :-1] for layer in self.taps], -1)
        next_BE = self.own_V[F.pad(ids_BT[:, 2:], (0, 1))]
        return ids_BT[:, 1:], tapped_BED, out.last_hidden_state[:, 1:], first_BE, next_BE

    def drafts(self, ids_BE: Tensor, tapped_BED: Tensor, said_BED: Tensor, first_BE: Tensor,
               next_BE: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of each depth: which entries draft, [B, E], and of those the logits of the layer and of the model,
        [M, W], and which word follows, [M]."""
        token_BED = self.model.model.embed_tokens(ids_BE).float()
        position_E = torch.arange(1, 1 + ids_BE.shape[1], device=self.device)
        rope = self.model.model.rotary_emb(token_BED, position_E[None])
        drafts_BE = first_BE
        with torch.autocast(self.device, torch.bfloat16, enabled=self.cuda or torch.is_grad_enabled()):
            for x_BED in self.eagle(token_BED, tapped_BED, rope):
                own_MW = self.eagle.lm_head(self.eagle.norm(x_BED[drafts_BE])).float()
                yield drafts_BE, own_MW, (said_BED[drafts_BE] @ self.head_WD.T).float(), next_BE[drafts_BE]
                drafts_BE = F.pad(drafts_BE[:, :-1], (1, 0)) & first_BE

    def train(self, learnt: Sequence[Chat], args: argparse.Namespace) -> None:
        """By cross entropy to what the model says, where the layer knows the word."""
        opt = torch.optim.AdamW(self.eagle.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
        known = [self.read(batch) for batch in batches(learnt, args.batch_tokens)]
        mean, dice, step = torch.zeros(DEPTH, device=self.device), random.Random(args.seed), 0
        started = said = time.time()
        while (spent := (time.time() - started) / args.seconds) < 1:
            if step % len(known) == 0:
                dice.shuffle(known)
            loss, right = 0.0, list[Tensor]()
            for depth, (_, own_MW, said_MW, next_M) in enumerate(self.drafts(*known[step % len(known)])):
                each_M = F.cross_entropy(own_MW, said_MW.softmax(-1), reduction="none")
                loss = loss + DECAY**depth * each_M.where(next_M >= 0, 0).sum() / max(1, len(next_M))
                right.append((own_MW.argmax(-1) == next_M).sum() / max(1, len(next_M)))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.eagle.parameters(), 1.0)
            opt.param_groups[0]["lr"] = args.rate * min(1.0, (step + 1) / 50) * max(0.02, 1 - spent)
            opt.step()
            step += 1
            mean.lerp_(torch.stack(right), 1 / min(step, 20))
            if time.time() - said > 10:
                said = time.time()
                print(f"{said - started:.0f} s, step {step}, {step / len(known):.1f} times all: right "
                      f"{shares(mean.tolist())}", flush=True)

    def save(self, out: Path) -> None:
        """And goes on with rounded weights."""
        self.eagle.bfloat16()
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.eagle.state_dict().items()}
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        (out / "config.json").write_text(json.dumps(open_checkpoint(locate("demo")).config | {
            "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": WORDS,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": self.taps}}))
        self.eagle.float()

    @torch.no_grad()
    def accepted(self, chats: Sequence[Chat], new: int) -> list[int]:
        """Steps behind the first token, drafts, and in how many steps one, two and three of them at least are
        right, of an engine that asks for DEPTH as far as an answer may go on."""
        found = [0] * (2 + DEPTH)
        for batch in batches(chats, 4096):
            right = [torch.zeros_like(drafts).masked_scatter(drafts, own.argmax(-1) == word).cpu()
                     for drafts, own, _, word in self.drafts(*self.read(batch))]
            for row, (prompt, answer) in enumerate(batch):
                n = 1  # tokens that have been said
                while n < len(answer):
                    most, good = min(DEPTH, new - n - 1), 0
                    while good < most and right[good][row, len(prompt) + n - 2 + good]:
                        found[2 + good] += 1
                        good += 1
                    found[0] += 1
                    found[1] += most
                    n += good + 1
        return found


def shares(some: Sequence[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in some)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value, what in (
            ("prompts", 16384, "answers to learn from, at most"), ("new", 160, "tokens of each, at most"),
            ("rows", 256, "answers at once"), ("asking", 60.0, "seconds for answers"),
            ("seconds", 100.0, "of training"), ("rate", 1e-3, "of learning"), ("seed", 0, ""),
            ("batch_tokens", 16384, "with what fills rows up")):
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=what)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (kept := args.out / "answers.json").exists():
        kept.write_text(json.dumps(answered(args)))
    answers = json.loads(kept.read_text())
    torch.manual_seed(args.seed)
    run = Trained(args.device, answers["learnt"])
    run.train(answers["learnt"], args)
    run.save(args.out)
    if run.cuda:
        torch.cuda.empty_cache()  # for the engine, which takes what is free
    with LLM("demo", device=args.device, max_model_len=2048, max_num_seqs=1, speculative_method="eagle3",
             speculative_model=str(args.out), dtype="bfloat16" if run.cuda else "float32") as llm:
        for kind in ("learnt", "held"):
            some = answers[kind][:MEASURED]
            steps, drafts, *right = run.accepted(some, answers["new"])
            print(f"{kind}, {len(some)} answers, {steps} steps: {sum(right)} of {drafts} drafts are right; "
                  f"first, second, third of a step {shares([n / steps for n in right])}", flush=True)
            prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt, _ in some]
            outputs = llm.generate(prompts, greedy(answers["new"]))
            same = sum(one.outputs[0].token_ids == said for one, (_, said) in zip(outputs, some, strict=True))
            drafts, good = (sum(getattr(one, name) for one in outputs)
                            for name in ("draft_tokens", "accepted_draft_tokens"))
            print(f"the engine accepts {good} of {drafts}; {same} answers as without", flush=True)


if __name__ == "__main__":
    main()
