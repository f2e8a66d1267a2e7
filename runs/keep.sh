#!/usr/bin/env bash
# results/methods.md, "Keep": the share of the keys that stays, for the naive and the shadow learner.
# Hardware: CPU, one core and 1 GB a job. Minutes: about 3 a run; 6 with 4 updates a rollout.
#   JOBS=2 bash runs/keep.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for keep in 1 0.7 0.5 0.3; do
    for method in naive smd; do
        cell "0 1 2 3 4" --task gsm8k --method $method --prompts 4 --keep $keep
    done
    table "keep $keep"
done
