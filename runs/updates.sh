#!/usr/bin/env bash
# results/methods.md, "Updates": one and four updates a rollout at three times the usual learning
# rate, where methods begin to break.
# Hardware: CPU, one core and 1 GB a job. Minutes: about 3 a run; 6 with 4 updates a rollout.
#   JOBS=2 bash runs/updates.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for updates in 4 1; do
    for how in "naive" "sparse-rl" "smd --lam 0" "smd --teacher self" "smd"; do
        cell "0 1 2 3 4" --task gsm8k --prompts 4 --keep 0.3 --lr 3e-4 \
            --updates-per-rollout $updates --method $how
    done
    table "$updates updates a rollout" --png out/updates-$updates
done
