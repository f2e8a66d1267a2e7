#!/usr/bin/env bash
# results/methods.md, "Policy": what is evicted, for the naive and the shadow learner.
# Hardware: CPU, one core and 1 GB a job. Minutes: about 3 a run; 6 with 4 updates a rollout.
#   JOBS=2 bash runs/policy.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for policy in "" "--policy recent" "--policy random" "--policy h2o"; do
    for method in naive smd; do
        cell "0 1 2 3 4" --task gsm8k --method $method --prompts 4 --keep 0.3 $policy
    done
    table "${policy:---policy snapkv}"
done
