"""The tasks of `penstock eval`: prompts with known answers, made from a seed. Knows no model.

Each task has two wordings: the words of the recall model, one token each, and plain English for any other.
"""
from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.config.base.errors import ConfigError
from penstock.eval import words

ADJECTIVES = ("amber ancient bright calm clever crimson distant early eager faint gentle golden happy hidden "
              "humble icy jolly lively lonely lucky merry misty noble orange proud quiet rapid silent silver "
              "sunny tiny violet").split()
NOUNS = ("anchor badger bridge candle canyon castle cedar comet dolphin eagle falcon forest garden harbor "
         "island kettle lantern maple meadow mirror otter pebble pepper pilot rabbit river saddle teapot "
         "tiger tower valley willow").split()
FILLER = ("The road went on along the river and past the old mill.",
          "In the morning the market was busy, and by noon it was quiet again.",
          "She wrote another page, closed the book and looked out of the window.",
          "Rain had been forecast for the whole week, but it never came.",
          "They spoke about the weather, the harvest and the price of salt.",
          "A ship came in at dusk and left before anyone had counted its crew.",
          "The clock on the tower had been ten minutes late for years.",
          "Nobody remembered who had planted the trees behind the school.")


@dataclass(frozen=True, slots=True)
class Question:
    """`answer`: its words must come in this order, the first one at once; any_order: the share of them that comes
    counts. `group`: a line of the table. `chat`: the prompt is a message, not a text to continue. `max_tokens`: of
    what is looked at. `budget`: `sparse_top_k` of the request."""

    group: str
    prompt: str
    answer: str
    max_tokens: int
    chat: bool = False
    budget: int | None = None
    any_order: bool = False

    def score(self, text: str) -> float:
        """How much of the answer a text has, 0 to 1."""
        found, wanted = (re.findall(r"\w+", x) for x in (text, self.answer))
        if self.any_order:
            return len({*wanted} & {*found}) / len(wanted)
        if not found or found[0] != wanted[0]:
            return 0.0
        rest = iter(found)
        return float(all(any(word == other for other in rest) for word in wanted))


@dataclass(frozen=True, slots=True)
class Interview:
    """Questions with their answers that are read token by token while decoding; in the recall model's
    words. `answers`: for each question the places of its answer among the words of `dialogue`."""

    group: str
    context: str
    dialogue: str
    answers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """contexts in tokens; of each `samples`, with `questions` each. `tokens_of`: length of a text."""

    contexts: tuple[int, ...]
    samples: int
    questions: int
    seed: int
    tokens_of: Callable[[str], int]

    def each(self, task: str) -> Iterator[tuple[int, random.Random]]:
        """Tokens of each sample, and the chance that makes it."""
        for context in self.contexts:
            for sample in range(self.samples):
                yield context, random.Random(f"{self.seed} {task} {context} {sample}")


# ---------------------------------------------------------------- the recall model's words
HOPS = {"recall": 1, "tracking": 2}
_SUM_STEPS = 4


def _pairs(task: str, tokens: int, count: int, rng: random.Random) -> tuple[str, list[list[str]]]:
    """A context of about `tokens` words with pairs spread over it; questions with their answers behind."""
    n = min(words.NUM_KEYS // 2, tokens // 5, max(count, tokens // 6))
    hops = HOPS.get(task, 1)
    n -= n % hops
    keys = [f"k{i}" for i in rng.sample(range(words.NUM_KEYS), n + n // hops)]
    if task == "tracking":
        values = keys[n // hops:]
    elif task == "sum":
        values = [str(rng.randrange(10)) for _ in range(n)]
    else:
        values = [f"v{rng.randrange(words.NUM_VALUES)}" for _ in range(n)]
    slots = max(n, (tokens - 12) // 2)
    text = [f"f{rng.randrange(words.NUM_FILLERS)}" for _ in range(2 * slots)]
    for i, slot in enumerate(rng.sample(range(slots), n)):
        text[2 * slot:2 * slot + 2] = keys[i], values[i]
    asked = []
    for at in rng.sample(range(n // hops), min(count, n // hops)):
        if task == "sum":
            total, question = 0, ["sum"]
            for step in [at, *rng.sample(range(n), _SUM_STEPS - 1)]:
                total = (total + int(values[step])) % 10
                question += [keys[step], str(total)]
        else:
            question = ["chain" if hops > 1 else "recall", keys[at]]
            question += [values[at + hop * (n // hops)] for hop in range(hops)]
        asked.append(question)
    return " ".join([*text, "|"]), asked


def in_words(task: str, size: Size) -> list[Question]:
    """recall, tracking, sum (its last step) and copying, each question behind the whole context."""
    questions = []
    for context, rng in size.each(task):
        if task == "copying":
            questions += _copying(context, size.questions, rng)
            continue
        known = HOPS.get(task, 1) if task != "sum" else 1
        text, asked = _pairs(task, context, size.questions, rng)
        for question in asked:
            prompt, answer = question[:-known], question[-known:]
            questions.append(Question(str(context), " ".join([text, *prompt]), " ".join(answer), known))
    return questions


def _copying(context: int, count: int, rng: random.Random) -> list[Question]:
    pool = words.words()[:words.FILLER]
    text = rng.sample(pool, min(len(pool), context // 2))
    again = context - len(text) - 16
    found = []
    for _ in range(count):
        at = rng.randrange(len(text))
        run = [text[(at + i) % len(text)] for i in range(again + 16)]
        found.append(Question(str(context), " ".join([*text, *run[:again]]), " ".join(run[again:]), 16))
    return found


def interviews(task: str, size: Size) -> list[Interview]:
    """The questions of a context one after the other, their answers given: each is one decode step."""
    made = []
    for context, rng in size.each(task):
        text, asked = _pairs(task, context, size.questions, rng)
        first, answers = 0, []
        for question in asked:
            places = range(2, len(question), 2 if task == "sum" else 1)
            answers.append(tuple(first + i for i in places))
            first += len(question)
        dialogue = " ".join(word for question in asked for word in question)
        made.append(Interview(str(context), text, dialogue, tuple(answers)))
    return made


# ---------------------------------------------------------------- plain English
def in_english(task: str, size: Size) -> list[Question]:
    """recall: codes of things; tracking: things that point to others, two steps."""
    questions = []
    for context, rng in size.each(task):
        for middle in ([""], [f"{n} " for n in NOUNS]):         # longer names where there must be more of them
            names = [f"{a} {m}{n}" for a in ADJECTIVES for m in middle for n in NOUNS]
            rng.shuffle(names)
            line = f"The code of the {names[0]} is {rng.randrange(1000, 9999)}.\n"
            if task == "tracking":
                line = f"The {names[0]} points to the {names[1]}.\n"
            n = max(4, (context - 48) // max(1, size.tokens_of(line * 8) // 8))
            if n <= len(names) // 2:
                break
        questions += (_codes if task == "recall" else _pointers)(str(context), names, n, size, rng)
    return questions


def _codes(group: str, names: list[str], n: int, size: Size, rng: random.Random) -> list[Question]:
    codes = [str(rng.randrange(1000, 9999)) for _ in range(n)]
    text = "".join(f"The code of the {name} is {code}.\n" for name, code in zip(names, codes, strict=False))
    return [Question(group, f"{text}\nAs said above, the code of the {names[at]} is", codes[at], 8)
            for at in rng.sample(range(n), min(size.questions, n))]


def _pointers(group: str, names: list[str], n: int, size: Size, rng: random.Random) -> list[Question]:
    n -= n % 2
    lines = [f"The {names[i]} points to the {names[i + n // 2]}.\n" for i in range(n)]
    rng.shuffle(lines)
    return [Question(group, "".join(lines) + f"\nAs said above, the {names[at]} points to the",
                     f"{names[at + n // 2]} points to the {names[at + n]}", 24)
            for at in rng.sample(range(n // 2), min(size.questions, n // 2))]


def needles(size: Size, haystack: str | None) -> list[Question]:
    """One fact at each of `questions` depths of a long text, asked for at its end."""
    questions = []
    for context, rng in size.each("needles"):
        text = haystack or " ".join(rng.choice(FILLER) for _ in range(context // 4))
        room = context - 64
        text = text[:len(text) * room // max(room, size.tokens_of(text))]
        for i in range(size.questions):
            depth = (i + 0.5) / size.questions
            name = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
            code = str(rng.randrange(10000, 99999))
            at = text.rfind(".", 0, int(len(text) * depth) + 1) + 1
            prompt = (f"{text[:at]} The secret number of the {name} is {code}.{text[at:]}\n\n"
                      f"As said above, the secret number of the {name} is")
            questions.append(Question(str(context), prompt, code, 8))
    return questions


CHAIN = 5                                   # variables that have one value
COMMON = 10                                 # words that are asked for


def variables(size: Size) -> list[Question]:
    """Chains of assignments in order, spread over a long text: all variables that have a value.

    Source: variable tracking of RULER, arXiv:2404.06654; `questions` chains in each text."""
    questions = []
    for context, rng in size.each("variables"):
        names = ["".join(chr(65 + n // 26 ** i % 26) for i in range(4))
                 for n in rng.sample(range(26 ** 4), CHAIN * size.questions)]
        chains = [names[i:i + CHAIN] for i in range(0, len(names), CHAIN)]
        values = rng.sample(range(10000, 99999), size.questions)
        said = [[f"VAR {chain[0]} = {value}.", *(f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(chain))]
                for chain, value in zip(chains, values, strict=True)]
        text = _spread(said, context - 64, size, rng)
        for chain, value in zip(chains, values, strict=True):
            ask = f"As said above, the {CHAIN} variables that have the value {value}, one assigned to the next, are VAR"
            questions.append(Question(str(context), f"{text}\n\n{ask}", " ".join(chain), 40, any_order=True))
    return questions


def _spread(said: list[list[str]], tokens: int, size: Size, rng: random.Random) -> str:
    """Sentences with these lines among them, each list in its order; `tokens` in all."""
    room = tokens - size.tokens_of(" ".join(line for lines in said for line in lines))
    each = size.tokens_of(" ".join(FILLER)) / len(FILLER)
    text = [(rng.random(), rng.choice(FILLER)) for _ in range(int(room / each))]
    for lines in said:
        text += zip(sorted(rng.random() for _ in lines), lines, strict=True)
    return " ".join(line for _, line in sorted(text, key=lambda placed: placed[0]))


def common(size: Size) -> list[Question]:
    """A list of words of which ten come often: which ones. One question a text.

    Source: common words extraction of RULER, arXiv:2404.06654: often is 30 times, others come 3 times; a text that
    is too short for that has a tenth of its words from each of the ten's share."""
    questions = []
    for context, rng in size.each("common"):
        pool = [a + b for a in (*ADJECTIVES, *NOUNS) for b in NOUNS if a != b]
        rng.shuffle(pool)
        count = 100 * (context - 64) // size.tokens_of(" ".join(f"{i}. {w}" for i, w in enumerate(pool[:100], 100)))
        often = min(30, count // (2 * COMMON))
        seldom = max(1, often // 10)
        others = -(-(count - COMMON * often) // seldom)
        said = (pool[:COMMON] * often + pool[COMMON:COMMON + others] * seldom)[:count]
        rng.shuffle(said)
        text = " ".join(f"{i}. {word}" for i, word in enumerate(said, 1))
        prompt = (f"A list of words, some of which come more often than others:\n{text}\n\n"
                  f"The {COMMON} words that come most often in the list are: 1.")
        questions.append(Question(str(context), prompt, " ".join(pool[:COMMON]), 120, any_order=True))
    return questions


def gsm8k(path: str, count: int, seed: int) -> list[Question]:
    """Problems of a GSM8K file: JSON lines with `question` and `answer`, which ends in `#### number`. Those of a
    smaller count come first in a larger one."""
    try:
        # Lines end in a newline: `splitlines` also ends them at marks that a JSON string may hold.
        lines = [json.loads(line) for line in Path(path).read_text("utf-8").split("\n") if line.strip()]
        pairs = [(str(p["question"]), str(p["answer"]).partition("####")[2]) for p in lines]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"--file {path}: not JSON lines with question and answer: {e}") from None
    if not pairs or not all(number_in(answer) for _, answer in pairs):
        raise ConfigError(f"--file {path}: every answer must end in '#### number'")
    picked = random.Random(seed).sample(pairs, len(pairs))[:count]
    ask = "{}\n\nThink step by step. End with a line '#### ' and the number alone."
    return [Question("gsm8k", ask.format(q), number_in(a) or "", 512, chat=True) for q, a in picked]


def number_in(text: str) -> str | None:
    """The last number of a text, without separators and trailing zeros; None if there is none."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    if not found:
        return None
    plain: str = found[-1].replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain
