"""One module a task: `load`, `reward`, and `METRICS` by name, the main one first."""

from data import govreport, gsm8k, hotpotqa, tldr

TASKS = {"gsm8k": gsm8k, "hotpotqa": hotpotqa, "govreport": govreport, "tldr": tldr}
