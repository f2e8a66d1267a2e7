# Sourced by the recipes. `cell SEEDS FLAGS...` names one row of a table, `table` trains what of it is
# missing, JOBS runs at a time (default 1), and prints it. A run that was finished is not done again,
# and two recipes with a row in common share it: out/runs/FLAGS/SEED. Remove out/runs after a change
# of the code or of the model. Flags hold no spaces or quotes. SEEDS="0 1 2" trains these alone.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-.venv/bin/python}
[ "${JOBS:-1}" = 1 ] || export OMP_NUM_THREADS=1 # on few cores faster than all threads for each
trap 'exit "${failed:-$?}"' EXIT
folders=() queue=

cell() {
    local folder seed flags="${*:2}"
    folder=out/runs/$(sed 's/--//g; s/ /_/g' <<< "$flags")
    folders+=("$folder")
    for seed in ${SEEDS:-$1}; do
        queue+="$folder/$seed --seed $seed --steps 40 --prompts 4 --lr 3e-4 --limit 128 $flags"$'\n'
    done
}

table() { # TITLE, flags of compare.py
    # shellcheck disable=SC2016
    printf %s "$queue" | xargs -r -P "${JOBS:-1}" -L 1 bash -c '
        [ -f "$1/summary.json" ] && exit
        mkdir -p "$(dirname "$1")"
        "$PYTHON" train.py --out "$@" --overwrite --no-control --save-every 0 > "$1.log" 2>&1 ||
            { tail -n 1 "$1.log" >&2; exit 1; }
        rm -f "$1"/checkpoint-*/trainer.pt # the state of the optimiser, the larger part' each ||
        { echo "not every run of this table finished: see above, and the seeds below" >&2; failed=1; }
    local folder found=()
    for folder in "${folders[@]}"; do
        ! compgen -G "$folder/*/config.json" > /dev/null || found+=("$folder")
    done
    printf '\n## %s\n\n' "$1"
    "$PYTHON" benchmarks/compare.py "${found[@]}" "${@:2}" || failed=1
    folders=() queue=
}
