"""TL;DR: posts with the one-line summary that their authors gave them.

Source: Stiennon et al., arXiv 2009.01325, after Voelske et al. 2017 (CC BY 4.0). Rows are objects
with subreddit, title, post and summary.
"""

from data.files import Problem, read_rows
from data.scores import rouge_l

ADDRESS = ("https://openaipublic.blob.core.windows.net/summarize-from-feedback/datasets/"
           "tldr_3_filtered/{split}.jsonl")
INSTRUCTION = "Summarize the post in one or two sentences, as its author would.\n\n"
PENALTY = 0.2  # of a summary of twice the reference's words, or more


def load(split: str, data_dir: str | None, *, shots: int = 0) -> list[Problem]:
    """Problems of "train" or "test"."""
    rows = read_rows("tldr", split, data_dir, ADDRESS.format(split=split), None, _row,
                     "an object with texts subreddit, title, post and summary")
    return [Problem(i, f"{INSTRUCTION}SUBREDDIT: r/{forum}\n\nTITLE: {title}\n\nPOST: ", summary,
                    post, "\n\nTL;DR:") for i, (forum, title, post, summary) in enumerate(rows)]


def _row(row: dict) -> tuple[str, ...]:
    return tuple(row[key].strip() for key in ("subreddit", "title", "post", "summary"))


def reward(completion: str, problem: Problem) -> float:
    """ROUGE-L, less up to PENALTY for what is longer than the reference."""
    excess = len(completion.split()) / max(1, len(problem.answer.split())) - 1
    return rouge_l(completion, problem.answer) - PENALTY * min(1.0, max(0.0, excess))


METRICS = {"rouge_l": lambda completion, problem: rouge_l(completion, problem.answer)}
