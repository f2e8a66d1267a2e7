"""How a text is compared with a reference: ROUGE-L, exact match and F1.

ROUGE-L (Lin 2004, sentence level, F-measure) equals the `rouge_score` package without stemming;
exact match and F1 follow the official evaluation of HotpotQA (arXiv 1809.09600).
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def rouge_l(text: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words; 0 if either has none."""
    a, b = (re.findall("[a-z0-9]+", x.lower()) for x in (text, reference))
    common = longest_common_subsequence(a, b)
    return 2 * common / (len(a) + len(b)) if common else 0.0


def longest_common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of it, with a row of the table as the bits of one integer (Hyyro 2004)."""
    where: dict[str, int] = {}
    for i, word in enumerate(a):
        where[word] = where.get(word, 0) | 1 << i
    full = row = (1 << len(a)) - 1
    for word in b:
        match = row & where.get(word, 0)
        row = (row + match | row - match) & full
    return len(a) - row.bit_count()


def normalise(answer: str) -> str:
    """Lower case, without punctuation, articles and superfluous spaces."""
    bare = answer.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(answer: str, reference: str) -> float:
    return float(normalise(answer) == normalise(reference))


def f1(answer: str, reference: str) -> float:
    """F1 of the words; 0 if one side is yes or no and they differ."""
    a, b = normalise(answer), normalise(reference)
    if a != b and {a, b} & {"yes", "no", "noanswer"}:
        return 0.0
    a, b = a.split(), b.split()
    common = (Counter(a) & Counter(b)).total()
    return 2 * common / (len(a) + len(b)) if common else 0.0
