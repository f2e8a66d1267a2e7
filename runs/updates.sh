#!/usr/bin/env bash
# results/methods.md, "updates": one and four updates a rollout at a high learning rate, where methods break.
# Hardware: CPU, one core and 1 GB a job. Minutes: MINUTES with JOBS=2 on 2 cores.
#   JOBS=2 bash runs/updates.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for updates in 1 4; do
    for how in "naive" "sparse-rl" "smd --lam 0" "smd --teacher self" "smd"; do
        cell "0 1 2 3 4" --task gsm8k --method $how --prompts 4 --keep 0.3 --lr 3e-4 \
            --updates-per-rollout $updates
    done
    table "$updates updates a rollout, lr 3e-4"
done
