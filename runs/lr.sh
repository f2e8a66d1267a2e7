#!/usr/bin/env bash
# results/methods.md, "Learning rate": a third and three times the rate of all other tables.
# Hardware: CPU, one core and 1 GB a job. Minutes: 1.5 to 2.5 a run.
#   JOBS=2 bash runs/lr.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for lr in "--lr 1e-4" "" "--lr 1e-3"; do
    for method in naive smd; do
        cell "0 1 2 3 4" --task gsm8k --keep 0.3 --method $method $lr
    done
    table "${lr:---lr 3e-4}"
done
