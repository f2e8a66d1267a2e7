#!/usr/bin/env bash
# results/methods.md, "distillation": the weight of the distillation, and whose dense pass teaches.
# Hardware: CPU, one core and 1 GB a job. Minutes: MINUTES with JOBS=2 on 2 cores.
#   JOBS=2 bash runs/lambda.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for teacher in "" "--teacher self"; do
    for lam in "--lam 0" "" "--lam 0.3" "--lam 0.8"; do
        [ "$lam" = "--lam 0" ] && of="" || of=$teacher # then there is no teacher
        cell "0 1 2 3 4" --task gsm8k --method smd --prompts 4 --keep 0.3 $lam $of
    done
    table "${teacher:---teacher initial}, lambda 0, 0.1, 0.3, 0.8"
done
