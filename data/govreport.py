"""GovReport: long reports of US government agencies, and their summaries.

Source: Huang et al., arXiv 2104.02112 (CC BY 4.0). Rows are objects with report and summary.
"""

from data.files import Problem, read_rows
from data.scores import rouge_l
from errors import BadInput

ADDRESS = "https://huggingface.co/datasets/ccdv/govreport-summarization"
INSTRUCTION = "Write a summary of the report.\n\n"


def load(split: str, data_dir: str | None, *, shots: int = 0) -> list[Problem]:
    """Problems of "train" or "test". The public set is in Parquet files, which are not read."""
    if data_dir is None:
        raise BadInput(f"govreport: expected --data-dir with train.jsonl and test.jsonl; make them "
                       f"from {ADDRESS}")
    rows = read_rows("govreport", split, data_dir, ADDRESS, None, _row,
                     "an object with texts report and summary")
    return [Problem(i, INSTRUCTION, summary, report, "\n\nSummary:")
            for i, (report, summary) in enumerate(rows)]


def _row(row: dict) -> tuple[str, str]:
    return row["report"].strip(), row["summary"].strip()


def reward(completion: str, problem: Problem) -> float:
    return rouge_l(completion, problem.answer)


METRICS = {"rouge_l": reward}
