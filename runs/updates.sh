#!/usr/bin/env bash
# results/methods.md, "Updates": one and four updates a rollout.
# Hardware: CPU, one core and 1 GB a job. Minutes: 1.5 to 4 a run, 2.5 to 5 with 4 updates a rollout.
#   JOBS=2 bash runs/updates.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for updates in "--updates-per-rollout 4 --steps 60" ""; do
    for how in "naive" "sparse-rl" "smd --lam 0" "smd --teacher self" "smd"; do
        cell "0 1 2 3 4" --task gsm8k --keep 0.3 --method $how $updates
    done
    table "${updates:---updates-per-rollout 1}" --png "out/updates${updates:+-4}"
done
for how in "naive" "smd --lam 0"; do
    cell "0 1 2" --task gsm8k --keep 0.3 --method $how --updates-per-rollout 4 --steps 200
done
table "200 steps"
