#!/usr/bin/env bash
# results/methods.md: the four methods on the four tasks, embedded model, one update a rollout.
# Hardware: CPU, one core and 1 GB a job. Minutes: MINUTES with JOBS=2 on 2 cores.
#   JOBS=2 bash runs/methods.sh
set -euo pipefail
cd "$(dirname "$0")/.."
for task in gsm8k hotpotqa govreport tldr; do
    case $task in gsm8k | hotpotqa) seeds=$(seq 0 4) ;; *) seeds=$(seq 0 2) ;; esac
    for seed in $seeds; do
        for method in dense naive sparse-rl smd; do
            echo "out/methods/$task/$method-$seed --task $task --method $method --seed $seed" \
                "--prompts 4 --keep 0.3"
        done
    done
done | bash runs/each.sh
for task in gsm8k hotpotqa govreport tldr; do
    echo "## $task"
    "${PYTHON:-.venv/bin/python}" benchmarks/compare.py out/methods/$task
done
