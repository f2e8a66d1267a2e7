#!/usr/bin/env bash
# The paper's tasks and methods on Qwen3-4B-Instruct-2507: a table a task. Not run yet.
# Known of the paper's settings: this model, SnapKV, half of the prompt kept once after prefill,
# lambda 0.1, the policy's own dense pass as teacher. Not known, so this project's defaults: learning
# rate, loss, prompts and samples a step, steps, lengths, seeds. Adapters are not in the paper.
# Hardware: one GPU of 80 GB (planned peaks 76 to 79 GB), or of 24 GB with LORA=16 (13 GB, govreport
# 18); see benchmarks/memory_plan.py. The initial model as teacher takes 84 GB without adapters.
# Hours: not measured; by operations and bandwidth about 1 a run of 200 steps on an H100, govreport
# 4, so some 30 in all.
#   [LORA=16] [DATA=FOLDER] bash runs/paper_4b.sh
# DATA holds a folder a task with its train.jsonl and test.jsonl. Without it govreport is left out,
# and the others are downloaded. What was finished is not done again, what was cut short goes on.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen3-4B-Instruct-2507} DATA=${DATA:+$(realpath "$DATA")}
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
for task in gsm8k hotpotqa tldr ${DATA:+govreport}; do
    folders=()
    for how in dense naive sparse-rl "smd --teacher self" ${LORA:+"smd --teacher initial"}; do
        folder=out/paper_4b${LORA:+_lora$LORA}/$task-${how// --teacher /-}
        folders+=("$folder")
        [ ! -f "$folder/summary.json" ] || continue
        mkdir -p "$(dirname "$folder")"
        go_on=--overwrite
        ! compgen -G "$folder/checkpoint-*" > /dev/null || go_on=--resume
        # shellcheck disable=SC2086
        $python train.py --task $task --model "$MODEL" --out "$folder" $go_on --method $how \
            --policy snapkv --keep 0.5 ${LORA:+--lora-rank $LORA} ${DATA:+--data-dir "$DATA/$task"}
    done
    printf '\n## %s\n\n' $task
    $python benchmarks/compare.py "${folders[@]}"
done
