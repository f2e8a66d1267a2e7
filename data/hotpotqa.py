"""HotpotQA, distractor setting: a question, ten paragraphs, two of which hold the answer.

Source: Yang et al., arXiv 1809.09600; hotpotqa.github.io (CC BY-SA 4.0). Rows are the official
ones, those of the Hugging Face set, or have a list of {title, text} as context.
"""

from data.files import Problem, read_rows
from data.scores import exact_match, f1

FILES = {"train": ("hotpot_train_v1.1.json",
                   "26650cf50234ef5fb2e664ed70bbecdfd87815e6bffc257e068efea5cf7cd316"),
         "test": ("hotpot_dev_distractor_v1.json",
                  "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea")}
ADDRESS = "http://curtis.ml.cmu.edu/datasets/hotpot/"
INSTRUCTION = ("Answer the question from the paragraphs. Reason briefly, then end with a line "
               "`Answer: ` and the answer in as few words as possible, or yes or no.\n\n")


def load(split: str, data_dir: str | None, *, shots: int = 0) -> list[Problem]:
    """Problems of "train" or "test" (the official development set)."""
    name, sha256 = FILES[split]
    rows = read_rows("hotpotqa", split, data_dir, ADDRESS + name, sha256, _row,
                     "an object with question, answer and context")
    return [Problem(i, INSTRUCTION, answer, context, f"\n\nQuestion: {question}")
            for i, (question, answer, context) in enumerate(rows)]


def _row(row: dict) -> tuple[str, str, str]:
    """(question, answer, paragraphs)"""
    context, paragraphs = row["context"], []
    if isinstance(context, dict):
        context = zip(context["title"], context["sentences"], strict=True)
    for x in context:
        title, text = (x["title"], x["text"]) if isinstance(x, dict) else x
        if isinstance(text, str) != isinstance(x, dict):
            raise ValueError(f"paragraph {x!r:.60}")
        paragraphs.append(f"{title.strip()}: {''.join(text).strip()}")
    if not paragraphs:
        raise ValueError("no paragraphs")
    return row["question"].strip(), row["answer"].strip(), "\n".join(paragraphs)


def answer(completion: str) -> str:
    """The rest of the line after the last `Answer:`, or all of a completion without one."""
    before, mark, after = completion.rpartition("Answer:")
    return after.strip().split("\n")[0] if mark else completion


def reward(completion: str, problem: Problem) -> float:
    return f1(answer(completion), problem.answer)


def em(completion: str, problem: Problem) -> float:
    return exact_match(answer(completion), problem.answer)


METRICS = {"f1": reward, "em": em}
