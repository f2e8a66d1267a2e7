r"""GSM8K: grade-school word problems with one number as the answer, and the reward that reads it.

Source: Cobbe et al., arXiv 2110.14168; the files of github.com/openai/grade-school-math (MIT).
Invariant: a completion is worth 1.0 or 0.0 and scoring never raises, whatever the model wrote.
"""

import hashlib
import http.client
import json
import os
import re
import urllib.request
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from tqdm import tqdm

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


@dataclass(frozen=True)
class Problem:
    index: int  # place in its file: the identity of the prompt
    prompt: str  # user text, before the chat format
    answer: str  # the reference final number as text, e.g. "18"


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
    """Rows as (question, solution, answer); downloads the file once if no folder is named."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    path = Path(data_dir or cache / "shadow-mask-distillation" / "gsm8k") / f"{split}.jsonl"
    address = ADDRESS.format(split=split)
    try:
        if not data_dir and not path.is_file():
            print(f"downloading {address} to {path}", flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            with (urllib.request.urlopen(address, timeout=60) as reply,
                  tqdm.wrapattr(reply, "read", reply.length, desc=path.name) as body):
                content = b"".join(iter(lambda: body.read(1 << 16), b""))
            if (got := hashlib.sha256(content).hexdigest()) != SHA256[split]:
                raise OSError(f"downloaded SHA-256 {got}, expected {SHA256[split]}")
            aside = path.with_suffix(f".{os.getpid()}")
            aside.write_bytes(content)
            aside.replace(path)  # a reader, or another process, sees the whole file or none
        # Not str.splitlines: a question holds a U+2028, which that takes for the end of a line.
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    except (OSError, http.client.HTTPException) as e:
        raise BadInput(f"{path}: {e}; expected the file of {address}; "
                       "name a folder that holds it: --data-dir FOLDER") from e
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            # Without the calculator's marks: 48/2 = <<48/2=24>>24
            question, text = (re.sub("<<[^<>]*>>", "", row[key]) for key in ("question", "answer"))
            solution, answer = text.rsplit("####", 1)
            if final_number(answer) != Fraction(answer.strip().replace(",", "")):
                raise ValueError(f"no plain number {answer!r}")
            rows.append((question, solution.rstrip(), answer.strip()))
        except (ArithmeticError, KeyError, TypeError, ValueError) as e:
            raise BadInput(f"{path}:{number}: {e!r}; expected an object with texts question and "
                           "answer, which ends in '#### NUMBER'; mend the line") from e
    return rows
