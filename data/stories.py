"""Generated GSM8K-style word problems: the task of the embedded model, with nothing to download.

A prompt holds two solved examples and a problem whose facts stand among irrelevant ones: half of
its KV cache is dispensable, but only the right half. A solution ends in GSM8K's line `#### N`.
"""

import random
from pathlib import Path

from data.files import Problem

MODEL = Path(__file__).resolve().parent / "embedded"  # made by runs/pretrain.py
INSTRUCTION = "Solve the problem step by step. End with #### and the number."
EXAMPLES = 2
SIZES = {"train": 4096, "test": 1024}
NAMES = ("Tom Ann Bob Sue Max Eva Leo Mia Ben Zoe Sam Ivy Dan Amy Jim Kay Ned Liz Roy Peg Hal Una "
         "Gus Fay").split()
ITEMS = ("pens cups hats books apples coins cards stones shells eggs keys balls rings stars boats "
         "plums").split()
IDLE = ("The sun is warm today.|It rains in the night.|The shop opens early.|"
        "The dog sleeps by the door.|A bus stops near the park.|The garden is green.|"
        "School starts after lunch.|The old clock is slow.").split("|")
KINDS = ("trade", "compare", "price", "boxes", "half", "days", "chain", "basket")
Step = tuple[int, str, int]


def _plot(kind: str, i, x: str, A: str, B: str, C: str) -> tuple[str, list[Step]]:
    """Facts and question, separated by "|", and solution steps, with numbers from i(low, high)."""
    match kind:
        case "trade":
            a, b = i(5, 30), i(2, 20)
            c = i(2, a + b - 1)
            return (f"{A} has {a} {x}.|{A} buys {b} more {x}.|Then {A} gives {c} {x} to {B}.|"
                    f"How many {x} does {A} have now?", [(a, "+", b), (a + b, "-", c)])
        case "compare":
            a, b = i(3, 20), i(2, 15)
            return (f"{A} has {a} {x}.|{B} has {b} more {x} than {A}.|"
                    f"How many {x} do {A} and {B} have together?", [(a, "+", b), (a, "+", a + b)])
        case "price":
            a, b = i(2, 9), i(2, 9)
            c = i(a * b + 1, a * b + 20)
            return (f"At the shop {x} cost {a} dollars each.|{A} takes {c} dollars along.|"
                    f"{A} buys {b} {x}.|How many dollars does {A} have left?",
                    [(b, "*", a), (c, "-", a * b)])
        case "boxes":
            a, b = i(2, 9), i(2, 9)
            c = i(1, a * b - 1)
            return (f"{A} fills {a} boxes with {b} {x} in each box.|{A} loses {c} {x}.|"
                    f"How many {x} does {A} still have?", [(a, "*", b), (a * b, "-", c)])
        case "half":
            a, b = 2 * i(3, 20), i(2, 20)
            return (f"{A} has {a} {x}.|{A} gives half of the {x} to {B}.|Then {A} finds {b} {x}.|"
                    f"How many {x} does {A} have in the end?", [(a, "/", 2), (a // 2, "+", b)])
        case "days":
            a, b, c = i(2, 9), i(2, 9), i(2, 20)
            return (f"{A} starts with {c} {x}.|{A} finds {a} {x} each day.|This goes on for {b} "
                    f"days.|How many {x} does {A} have after that?", [(a, "*", b), (c, "+", a * b)])
        case "chain":
            a, b = i(3, 20), i(4, 15)
            c = i(2, a + b - 1)
            return (f"{A} has {a} {x}.|{B} has {b} more {x} than {A}.|{C} has {c} fewer {x} than "
                    f"{B}.|How many {x} do {A} and {C} have together?",
                    [(a, "+", b), (a + b, "-", c), (a, "+", a + b - c)])
    a, b, p, q = (i(2, 7) for _ in range(4))  # basket
    c = i(a * p + b * q + 1, a * p + b * q + 15)
    return (f"{A} buys {a} {x} for {p} dollars each.|Then {A} buys {b} bags for {q} dollars each.|"
            f"{A} had {c} dollars before.|How many dollars does {A} have left?",
            [(a, "*", p), (b, "*", q), (a * p, "+", b * q), (c, "-", a * p + b * q)])


def story(r: random.Random, distractors: int) -> tuple[str, list[Step], str]:
    """Text, solution steps and kind of a problem with `distractors` facts about other people."""
    kind = KINDS[r.randrange(len(KINDS))]
    names, items = r.sample(NAMES, 3 + distractors), r.sample(ITEMS, 3)
    text, steps = _plot(kind, r.randint, items[0], *names[:3])
    *facts, question = text.split("|")
    for name in names[3:]:
        place, n, item = r.randint(0, len(facts)), r.randint(2, 30), r.choice(items)
        facts.insert(place, r.choice((f"{name} has {n} {item}.", f"{name} wants {n} {item}.",
                                      f"{name} saw {n} {item} in the park.", r.choice(IDLE))))
    return " ".join([*facts, question]), steps, kind


def result(step: Step) -> int:
    a, op, b = step
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]


def work(steps: list[Step]) -> str:
    """The reasoning: `12 + 5 = 17. 17 - 4 = 13.`"""
    return " ".join(f"{a} {op} {b} = {result((a, op, b))}." for a, op, b in steps)


def solution(steps: list[Step]) -> str:
    return f"{work(steps)}\n#### {result(steps[-1])}"


def prompt(r: random.Random, question: str, examples: int = EXAMPLES) -> str:
    """Instruction, solved examples and the question, as one user message."""
    solved = (story(r, r.randint(0, 1)) for _ in range(examples))
    shown = [f"Question: {text}\nAnswer: {solution(steps)}" for text, steps, _ in solved]
    return "\n\n".join([INSTRUCTION, *shown, f"Question: {question}"])


def problem(split: str, index: int) -> Problem:
    """Problem `index` of the split "train" or "test"; prompts have 170 to 282 tokens."""
    r = random.Random(f"{split} {index}")
    question, steps, _ = story(r, r.randint(1, 3))
    return Problem(index, prompt(r, question), str(result(steps[-1])))


def load(split: str) -> list[Problem]:
    """The problems of a split, always the same: 4,096 to train on, 1,024 to test."""
    return [problem(split, i) for i in range(SIZES[split])]
