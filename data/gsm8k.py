r"""GSM8K: grade-school word problems with one number as the answer, and the reward that reads it.

Source: Cobbe et al., arXiv 2110.14168; the files of github.com/openai/grade-school-math (MIT).
Invariant: a completion is worth 1.0 or 0.0 and scoring never raises, whatever the model wrote.
"""

import re
from fractions import Fraction

from data.files import Problem, read_rows
from errors import BadInput

# A fixed commit: the bytes behind the address cannot change.
ADDRESS = ("https://raw.githubusercontent.com/openai/grade-school-math/"
           "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/{split}.jsonl")
SHA256 = {"train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
          "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"}
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
MAX_NUMBER_CHARS = 1000  # longer is no answer; int() raises beyond 4300 digits

# Commas only between groups of three, so "3,4,5" is a list; a dot after a word ends a sentence.
_UNSIGNED = (r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
             r"(?:[eE][+-]?[0-9]{1,2}(?![0-9]))?")
# A minus after a digit, word or bracket is a subtraction or a range: "10-18" ends in 18.
_NUMBER = re.compile(rf"(?:(?<![\w)}}%-])-\$?)?{_UNSIGNED}(?: ?/ ?{_UNSIGNED})?")
_BOX = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")  # and one level of braces in it


def load(split: str, data_dir: str | None, *, shots: int = 0) -> list[Problem]:
    """Problems of "train" or "test", in file order. BadInput: unusable argument, file or download.

    Args:
        data_dir: folder with the official {split}.jsonl; None downloads once into the user's cache.
        shots: solved training rows before each question; left out of the "train" split itself.
    """
    rows = _read(split, data_dir)
    train = _read("train", data_dir) if shots else []
    if shots and not 0 <= shots < len(train):
        raise BadInput(f"--shots is {shots}; expected 0 to {len(train) - 1}; choose one of these")
    shown = "".join(f"Question: {q}\nAnswer: {s}\n\\boxed{{{a}}}\n\n" for q, s, a in train[:shots])
    before = shown + "Question: " if shots else ""
    problems = [Problem(i, before + q + INSTRUCTION, a) for i, (q, _, a) in enumerate(rows)]
    return problems[shots:] if split == "train" else problems


def reward(completion: str, problem: Problem) -> float:
    """1.0 if the completion, text up to its stop token, ends on the reference number, else 0.0."""
    expected = final_number(problem.answer)
    assert expected is not None, problem  # else "no answer" would equal "no reference"
    return float(final_number(completion) == expected)


METRICS = {"accuracy": reward}


def final_number(text: str) -> Fraction | None:
    r"""The number a text ends on, exact; None if there is none. Takes time linear in the text.

    The last number in the last balanced \boxed{...}, else the first number on the line of the last
    `####`, else the last of all. Units, `$` and `%` are ignored ("50%" is 50), `3/4` and `1.5e3`
    are numbers; division by zero, or over MAX_NUMBER_CHARS characters, is none.
    """
    text = text.replace("\u2212", "-").replace("{,}", ",")
    text = re.sub(r"\\[$,!{}]", "", text)  # thin spaces, as in 1\,234; printed braces and $
    text = re.sub(r"(?<=[A-Za-z}])\^(?:[0-9]|\{[0-9]+\})", "", text)  # the 2 of m^2 is a unit
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    boxes, hashes = _BOX.findall(text), re.findall(r"#{4,}\s*([^\n#]*)", text)
    for parts, place in ((boxes, -1), (hashes, 0), ([text], -1)):
        numbers = _NUMBER.findall(parts[-1]) if parts else []
        if numbers and len(numbers[place]) <= MAX_NUMBER_CHARS:
            top, _, bottom = re.sub("[$, ]", "", numbers[place]).partition("/")
            if divisor := Fraction(bottom or 1):
                return Fraction(top) / divisor
    return None


def _read(split: str, data_dir: str | None) -> list[tuple[str, str, str]]:
    """Rows as (question, solution, answer)."""
    return read_rows("gsm8k", split, data_dir, ADDRESS.format(split=split), SHA256[split], _row,
                     "an object with texts question and answer, which ends in '#### NUMBER'")


def _row(row: dict) -> tuple[str, str, str]:
    # Without the calculator's marks: 48/2 = <<48/2=24>>24
    question, text = (re.sub("<<[^<>]*>>", "", row[key]) for key in ("question", "answer"))
    solution, answer = text.rsplit("####", 1)
    if final_number(answer) != Fraction(answer.strip().replace(",", "")):
        raise ValueError(f"no plain number {answer!r}")
    return question, solution.rstrip(), answer.strip()
