#!/usr/bin/env bash
# results/mismatch_real.md: how far sampler and learner are apart on a real checkpoint, 4 tasks x 4
# policies x 3 shares, 2 prompts x 4 samples x 48 tokens, float32.
# Hardware: one CPU core, 8 GB. Minutes: 105 for a 0.5 B model, on a busy machine.
#   MODEL=FOLDER DATA=FOLDER bash runs/mismatch.sh
# DATA holds a folder a task with its test.jsonl; without it all but govreport are downloaded.
set -euo pipefail
MODEL=$(realpath "${MODEL:?name a checkpoint folder}") DATA=${DATA:+$(realpath "$DATA")}
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} out=out/mismatch/$(basename "$MODEL")
mkdir -p "$out"
for task in gsm8k hotpotqa govreport tldr; do
    [ -f "$out/$task.jsonl" ] && continue
    $python benchmarks/mismatch.py --task $task --model "$MODEL" --grid --dtype fp32 \
        ${DATA:+--data-dir "$DATA/$task"} --max-prompt 2048 --prompts 2 --group 4 --max-new 48 \
        --limit 2 > "$out/$task.tmp"
    grep '^{' "$out/$task.tmp" > "$out/$task.jsonl"
done
$python - "$out"/*.jsonl <<'END'
import json, sys
print("| task | policy | keep | prompt tokens | shadow: mean | largest | dense: mean | largest | k3 |"
      " 1 % ratio | outside [0.9, 1.1] |\n|" + "---|" * 11)
for path in sys.argv[1:]:
    rows = [json.loads(x) for x in open(path)]
    for a, b in zip(rows[::2], rows[1::2]):
        print(f"| {a['task']} | {a['policy']} | {a['keep']} | {a['prompt_tokens']} | "
              f"{a['logp_abs_mean']:.1e} | {a['logp_abs_max']:.1e} | {b['logp_abs_mean']:.2f} | "
              f"{b['logp_abs_max']:.1f} | {b['kl']:.2g} | {b['ratio_p01']:.1e} | "
              f"{b['outside_frac']:.2f} |")
END
