#!/usr/bin/env bash
# results/methods.md, "Distillation": its weight, and whose dense pass teaches. With lambda 1000 the
# reward plays no part: that is the distillation alone.
# Hardware: CPU, one core and 1 GB a job. Minutes: 2.5 to 8 a run.
#   JOBS=2 bash runs/lambda.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for teacher in "" "--teacher self"; do
    for lam in "--lam 0" "" "--lam 0.3" "--lam 0.8" "--lam 1000"; do
        how="smd $lam $teacher"
        [ "$lam" != "--lam 0" ] || how="smd $lam" # no teacher
        seeds="0 1 2 3 4"
        [ "$lam" != "--lam 1000" ] || seeds="0 1 2"
        cell "$seeds" --task gsm8k --keep 0.3 --method $how --updates-per-rollout 4 --steps 60
    done
    table "${teacher:---teacher initial}" --png "out/lambda${teacher:+-self}"
done
