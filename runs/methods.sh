#!/usr/bin/env bash
# results/methods.md, "Tasks": the four methods on the four tasks, one update a rollout. At 0.3 the
# short prompts of the last three would keep little but a window of 32: theirs has 8 queries.
# Hardware: CPU, one core and 1 GB a job. Minutes: 1 to 3.5 a run.
#   JOBS=2 bash runs/methods.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for task in gsm8k hotpotqa govreport tldr; do
    seeds="0 1 2" window="--window 8"
    case $task in gsm8k | hotpotqa) seeds="0 1 2 3 4" ;; esac
    [ $task != gsm8k ] || window=
    for method in dense naive sparse-rl smd; do
        cell "$seeds" --task $task --keep 0.3 $window --method $method
    done
    table $task
done
