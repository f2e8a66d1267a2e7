#!/usr/bin/env bash
# results/methods.md, "Tasks": the four methods on the four tasks, one update a rollout.
# Hardware: CPU, one core and 1 GB a job. Minutes: about 3 a run; 6 with 4 updates a rollout.
#   JOBS=2 bash runs/methods.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for task in gsm8k hotpotqa govreport tldr; do
    case $task in gsm8k | hotpotqa) seeds="0 1 2 3 4" ;; *) seeds="0 1 2" ;; esac
    for method in dense naive sparse-rl smd; do
        cell "$seeds" --task $task --method $method --prompts 4 --keep 0.3
    done
    table $task
done
