r"""GSM8K: grade-school word problems with one number as the answer, and the reward that reads it.

Source: Cobbe et al., arXiv 2110.14168; the files of github.com/openai/grade-school-math (MIT).
Invariant: a completion is worth 1.0 or 0.0 and scoring never raises, whatever the model wrote.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import tempfile
import urllib.request
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from tqdm import tqdm

from errors import BadInput

# A fixed commit: the bytes behind the address cannot change.
ADDRESS = (
    "https://raw.githubusercontent.com/openai/grade-school-math/"
    "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/{split}.jsonl"
)
SHA256 = {
    "train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
MAX_NUMBER_CHARS = 1000  # longer is no answer; int() raises beyond 4300 digits

# Commas only between groups of three, so "3,4,5" is a list; a dot after a word ends a sentence.
_UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,2}(?![0-9]))?"
)
# A minus after a digit, word or bracket is a subtraction or a range: "10-18" ends in 18.
_NUMBER = re.compile(
    rf"(?P<minus>(?<![\w)}}%-])-\$?)?(?P<top>{_UNSIGNED})(?: ?/ ?(?P<bottom>{_UNSIGNED}))?"
)
_BRACE = re.compile(r"\\boxed\s*\{|\\?[{}]")


@dataclass(frozen=True)
class Problem:
    index: int  # place in its file: the identity of the prompt
    prompt: str  # user text, before the chat format
    answer: str  # the reference final number as text, e.g. "18"


def load(split: str, data_dir: str | None, *, shots: int = 0) -> list[Problem]:
    """The problems of one split, in the order of the file.

    Args:
        split: "train" or "test".
        data_dir: folder with the official {split}.jsonl; None downloads once into the user's cache.
        shots: solved training rows before each question. They are left out of the "train" split,
            where a prompt would otherwise hold its own answer; the indices of the rest stay.
    Raises:
        BadInput: unusable argument, file or download.
    """
    if split not in SHA256:
        raise BadInput(f"GSM8K has no split {split!r}; expected train or test; choose one of them")
    train = _read(_locate("train", data_dir)) if shots or split == "train" else []
    if shots and not 0 <= shots < len(train):
        raise BadInput(f"--shots is {shots}; expected 0 to {len(train) - 1}, as the training file "
                       f"has {len(train)} rows; choose a number in that range")
    rows = train if split == "train" else _read(_locate("test", data_dir))
    before = "".join(f"Question: {question}\nAnswer: {solution}\n\\boxed{{{answer}}}\n\n"
                     for question, solution, answer in train[:shots])
    before += "Question: " if shots else ""
    problems = [Problem(index, before + question + INSTRUCTION, answer)
                for index, (question, _, answer) in enumerate(rows)]
    return problems[shots:] if split == "train" else problems


def reward(completion: str, problem: Problem) -> float:
    """1.0 if the completion, text up to its stop token, ends on the reference number, else 0.0."""
    expected = final_number(problem.answer)
    assert expected is not None, problem  # else "no answer" would equal "no reference"
    return 1.0 if final_number(completion) == expected else 0.0


def final_number(text: str) -> Fraction | None:
    r"""The number a text ends on, exact; None if there is none.

    The last number in the last balanced \boxed{...}, else the first number on the line of the last
    `####`, else the last number of all. Units, `$` and `%` are ignored ("50%" is 50), `3/4` and
    `1.5e3` are numbers; division by zero, or over MAX_NUMBER_CHARS characters, is none. The whole
    takes time linear in the text: models write degenerate ones. Not read: mixed numbers, `10^3`.

    Source: the `####` rule is that of arXiv 2110.14168. Differs: it compared strings.
    """
    text = text.replace("\u2212", "-").replace("\\$", "$").replace("{,}", ",")
    text = re.sub(r"\\[,!]", "", text)  # thin spaces inside 1\,234 and 1,\!234
    text = re.sub(r"(?<=[A-Za-z}])\^(?:[0-9]|\{[0-9]+\})", "", text)  # the 2 of m^2 is a unit
    text = re.sub(r"(?<=[0-9])(?=\\[dt]?frac)", " ", text)  # 1\frac{1}{2} is not 11/2
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    value = _number_at(-1, _last_box(text))
    if value is None:
        _, mark, tail = text.rpartition("####")
        value = _number_at(0, tail.lstrip().partition("\n")[0]) if mark else None
    return _number_at(-1, text) if value is None else value


def _number_at(place: int, text: str) -> Fraction | None:
    found = list(_NUMBER.finditer(text))
    if not found or len(found[place][0]) > MAX_NUMBER_CHARS:
        return None
    minus, top, bottom = found[place].group("minus", "top", "bottom")
    value, divisor = (Fraction(part.replace(",", "")) for part in (top, bottom or "1"))
    if divisor == 0:
        return None
    return (-value if minus else value) / divisor


def _last_box(text: str) -> str:
    r"""What the last \boxed{...} to close holds; "" if none closes. One pass with a stack."""
    opened, box = [], ""
    for token in _BRACE.finditer(text):
        if token[0] == "}":
            is_box, start = opened.pop() if opened else (False, 0)
            box = text[start : token.start()] if is_box else box
        elif token[0] not in ("\\{", "\\}"):
            opened.append((token[0] != "{", token.end()))
    return box


def _read(path: Path) -> list[tuple[str, str, str]]:
    try:
        content = path.read_bytes()
    except OSError as e:
        raise BadInput(f"{path}: cannot be read ({e.strerror}); expected the official GSM8K file; "
                       "name the folder that holds it: --data-dir FOLDER") from e
    rows = []
    # Not str.splitlines: one question holds a U+2028, which that takes for the end of a line.
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            rows.append(_parse(line))
        except (ValueError, RecursionError) as e:
            raise BadInput(f"{path}:{number}: {e}; expected a JSON object with the texts question "
                           "and answer, which ends in '#### NUMBER'; mend the line") from e
    return rows


def _parse(line: bytes) -> tuple[str, str, str]:
    """A row as (question, solution, answer); the solution is without its `####` line."""
    if not line.strip():
        raise ValueError("nothing on this line")
    row = json.loads(line.decode("utf-8"))
    for field in ("question", "answer"):
        if not isinstance(row, dict) or not isinstance(row.get(field), str) or not row[field]:
            raise ValueError(f"no text {field!r} in an object")
    solution, mark, answer = row["answer"].rpartition("####")
    if not mark or not _NUMBER.fullmatch(answer.strip()) or final_number(answer) is None:
        raise ValueError("the answer has no final '#### NUMBER'")
    solution = re.sub(r"<<[^<>]*>>", "", solution)  # calculator marks: 48/2 = <<48/2=24>>24
    return row["question"], solution.rstrip(), answer.strip()


def _locate(split: str, data_dir: str | None) -> Path:
    """The file of a split: in the user's folder, else in the cache, else downloaded into it."""
    if data_dir is not None:
        return Path(data_dir) / f"{split}.jsonl"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    path = cache / "shadow-mask-distillation" / "gsm8k" / f"{split}.jsonl"
    address = ADDRESS.format(split=split)
    try:
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256[split]:
            _download(address, path, SHA256[split])
    except (OSError, http.client.HTTPException) as e:
        raise BadInput(f"{address}: cannot be downloaded to {path} ({e}); expected network access; "
                       f"or name a folder that holds {path.name}: --data-dir FOLDER") from e
    return path


def _download(address: str, path: Path, sha256: str) -> None:
    print(f"downloading {address} to {path}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed: a reader, or another process, sees the whole file or none.
    with tempfile.TemporaryDirectory(dir=path.parent) as aside:
        part = Path(aside) / path.name
        with (urllib.request.urlopen(address, timeout=60) as reply, part.open("wb") as out,
              tqdm(total=reply.length, unit="B", unit_scale=True, desc=path.name) as bar):
            while chunk := reply.read(1 << 16):
                bar.update(out.write(chunk))
        got = hashlib.sha256(part.read_bytes()).hexdigest()
        if got != sha256:
            raise BadInput(f"{address}: got SHA-256 {got}; expected {sha256}; try again, or name a "
                           f"folder that holds {path.name}: --data-dir FOLDER")
        part.replace(path)
