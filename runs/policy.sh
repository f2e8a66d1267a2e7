#!/usr/bin/env bash
# results/methods.md, "Policy": what is evicted, for the naive and the shadow learner.
# Hardware: CPU, one core and 1 GB a job. Minutes: about 2 a run.
#   JOBS=2 bash runs/policy.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for policy in "" "--policy recent" "--policy random" "--policy h2o"; do
    for method in naive smd; do
        cell "0 1 2 3 4" --task gsm8k --keep 0.3 --method $method $policy
    done
    table "${policy:---policy snapkv}"
done
