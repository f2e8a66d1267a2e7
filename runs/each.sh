#!/usr/bin/env bash
# Train one run a line of the standard input, `FOLDER FLAGS...`, leaving out the finished ones.
# JOBS runs at a time (default 1), one thread each if there are several: on few cores that is faster.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-.venv/bin/python}
[ "${JOBS:-1}" = 1 ] || export OMP_NUM_THREADS=1
# shellcheck disable=SC2016
xargs -P "${JOBS:-1}" -L 1 bash -c '
    [ -f "$1/summary.json" ] && exit
    mkdir -p "$(dirname "$1")"
    "$PYTHON" train.py --out "$@" --overwrite --no-control --save-every 0 > "$1.log" 2>&1 ||
        { tail -n 1 "$1.log" >&2; exit 1; }' each
