"""Generated GSM8K-style word problems: the task of the embedded model, with nothing to download.

A prompt holds two solved examples and then a problem whose facts stand among irrelevant ones, so
that half of its KV cache is dispensable, but only the right half. A solution is one or more
arithmetic steps and a last line `#### N`, GSM8K's own answer format. Problem `i` of a split is a
function of (split, i) alone.
"""

from __future__ import annotations

import random
from pathlib import Path

from data.gsm8k import Problem

MODEL = Path(__file__).resolve().parent / "embedded"  # made by data/pretrain.py
NAMES = ("Tom Ann Bob Sue Max Eva Leo Mia Ben Zoe Sam Ivy Dan Amy Jim Kay Ned Liz Roy Peg Hal Una "
         "Gus Fay").split()
ITEMS = ("pens cups hats books apples coins cards stones shells eggs keys balls rings stars boats "
         "plums").split()
IDLE = ("The sun is warm today.", "It rains in the night.", "The shop opens early.",
        "The dog sleeps by the door.", "A bus stops near the park.", "The garden is green.",
        "School starts after lunch.", "The old clock is slow.")
INSTRUCTION = "Solve the problem step by step. End with #### and the number."
EXAMPLES = 2

Step = tuple[int, str, int]
Story = tuple[list[str], str, list[Step]]  # facts in order, question, solution steps
_OPS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
        "/": lambda a, b: a // b}


def _trade(r: random.Random, who: list[str], item: str) -> Story:
    a, b = r.randint(5, 30), r.randint(2, 20)
    c = r.randint(2, a + b - 1)
    return ([f"{who[0]} has {a} {item}.", f"{who[0]} buys {b} more {item}.",
             f"Then {who[0]} gives {c} {item} to {who[1]}."],
            f"How many {item} does {who[0]} have now?", [(a, "+", b), (a + b, "-", c)])


def _compare(r: random.Random, who: list[str], item: str) -> Story:
    a, b = r.randint(3, 20), r.randint(2, 15)
    return ([f"{who[0]} has {a} {item}.", f"{who[1]} has {b} more {item} than {who[0]}."],
            f"How many {item} do {who[0]} and {who[1]} have together?",
            [(a, "+", b), (a, "+", a + b)])


def _price(r: random.Random, who: list[str], item: str) -> Story:
    a, b = r.randint(2, 9), r.randint(2, 9)
    c = r.randint(a * b + 1, a * b + 20)
    return ([f"At the shop {item} cost {a} dollars each.", f"{who[0]} takes {c} dollars along.",
             f"{who[0]} buys {b} {item}."],
            f"How many dollars does {who[0]} have left?", [(b, "*", a), (c, "-", a * b)])


def _boxes(r: random.Random, who: list[str], item: str) -> Story:
    a, b = r.randint(2, 9), r.randint(2, 9)
    c = r.randint(1, a * b - 1)
    return ([f"{who[0]} fills {a} boxes with {b} {item} in each box.",
             f"{who[0]} loses {c} {item}."],
            f"How many {item} does {who[0]} still have?", [(a, "*", b), (a * b, "-", c)])


def _half(r: random.Random, who: list[str], item: str) -> Story:
    a, b = 2 * r.randint(3, 20), r.randint(2, 20)
    return ([f"{who[0]} has {a} {item}.", f"{who[0]} gives half of the {item} to {who[1]}.",
             f"Then {who[0]} finds {b} {item}."],
            f"How many {item} does {who[0]} have in the end?", [(a, "/", 2), (a // 2, "+", b)])


def _days(r: random.Random, who: list[str], item: str) -> Story:
    a, b = r.randint(2, 9), r.randint(2, 9)
    c = r.randint(2, 20)
    return ([f"{who[0]} starts with {c} {item}.", f"{who[0]} finds {a} {item} each day.",
             f"This goes on for {b} days."],
            f"How many {item} does {who[0]} have after that?", [(a, "*", b), (c, "+", a * b)])


KINDS = (_trade, _compare, _price, _boxes, _half, _days)


def _distractor(r: random.Random, who: str, items: list[str]) -> str:
    n, item = r.randint(2, 30), r.choice(items)
    return r.choice((f"{who} has {n} {item}.", f"{who} wants {n} {item}.",
                     f"{who} saw {n} {item} in the park.", r.choice(IDLE)))


def story(r: random.Random, distractors: int) -> tuple[str, list[Step], int]:
    """One problem: its text, its solution steps, and which of `KINDS` it is.

    `distractors` irrelevant facts, about other people, stand anywhere among the relevant ones.
    """
    kind = r.randrange(len(KINDS))
    names, items = r.sample(NAMES, 2 + distractors), r.sample(ITEMS, 3)
    facts, question, steps = KINDS[kind](r, names[:2], items[0])
    for name in names[2:]:
        facts.insert(r.randint(0, len(facts)), _distractor(r, name, items))
    return " ".join([*facts, question]), steps, kind


def result(step: Step) -> int:
    a, op, b = step
    return _OPS[op](a, b)


def work(steps: list[Step]) -> str:
    """The reasoning, `12 + 5 = 17. 17 - 4 = 13.`"""
    return " ".join(f"{a} {op} {b} = {result((a, op, b))}." for a, op, b in steps)


def solution(steps: list[Step]) -> str:
    return f"{work(steps)}\n#### {result(steps[-1])}"


def prompt(r: random.Random, question: str, examples: int = EXAMPLES) -> str:
    """Instruction, solved examples and the question, as one user message."""
    parts = [INSTRUCTION]
    for _ in range(examples):
        text, steps, _ = story(r, r.randint(0, 1))
        parts.append(f"Question: {text}\nAnswer: {solution(steps)}")
    return "\n\n".join([*parts, f"Question: {question}"])


def problem(split: str, index: int) -> Problem:
    """Problem `index` of the split "train" or "test" (prompts of 190-330 tokens)."""
    r = random.Random(f"{split} {index}")
    question, steps, _ = story(r, r.randint(1, 3))
    return Problem(index, prompt(r, question), str(result(steps[-1])))


def load(split: str) -> list[Problem]:
    """The problems of a split, always the same: 4,096 to train on, 1,024 to test."""
    return [problem(split, i) for i in range({"train": 4096, "test": 1024}[split])]
