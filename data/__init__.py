"""One module a task: `load`, `reward` and `metrics`, whose first entry is the main one."""

from data import govreport, gsm8k, hotpotqa, tldr

TASKS = {"gsm8k": gsm8k, "hotpotqa": hotpotqa, "govreport": govreport, "tldr": tldr}
