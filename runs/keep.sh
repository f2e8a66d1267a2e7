#!/usr/bin/env bash
# results/methods.md, "Keep": the share of the keys that stays, for the naive and the shadow learner.
# At 1 nothing is evicted, and the two are one.
# Hardware: CPU, one core and 1 GB a job. Minutes: about 2 a run.
#   JOBS=2 bash runs/keep.sh
set -euo pipefail
source "$(dirname "$0")/common.sh"
for keep in 1 0.7 0.5 0.3; do
    for method in smd naive; do
        [ "$keep $method" != "1 naive" ] || continue
        cell "0 1 2 3 4" --task gsm8k --keep $keep --method $method
    done
    table "--keep $keep"
done
