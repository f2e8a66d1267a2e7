#!/usr/bin/env bash
# results/length.md: what the length of a response does to the ratios of the dense learner, and to
# the share of samples that Sparse-RL would leave out. A real checkpoint, GSM8K, float32.
# Hardware: one CPU core, 8 GB. Minutes: 14 for a 0.5 B model, on a busy machine.
#   MODEL=FOLDER DATA=FOLDER bash runs/length.sh
# DATA holds gsm8k/test.jsonl; without it the questions are downloaded.
set -euo pipefail
MODEL=$(realpath "${MODEL:?name a checkpoint folder}") DATA=${DATA:+$(realpath "$DATA")}
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} out=out/length/$(basename "$MODEL")
mkdir -p "$out"
for length in 24 48 96 192; do
    [ -f "$out/$length.jsonl" ] && continue
    $python benchmarks/mismatch.py --task gsm8k --model "$MODEL" --dtype fp32 \
        ${DATA:+--data-dir "$DATA/gsm8k"} --prompts 8 --group 4 --max-new $length --limit 8 \
        > "$out/$length.tmp"
    grep '^{' "$out/$length.tmp" > "$out/$length.jsonl"
done
$python - "$out"/{24,48,96,192}.jsonl <<'END'
import json, sys
print("| longest | tokens | shadow: largest | dense: mean | largest | k3 | 1 % ratio | smallest |"
      " outside [0.9, 1.1] | samples rejected |\n|" + "---|" * 10)
for path in sys.argv[1:]:
    a, b = (json.loads(x) for x in open(path))
    print(f"| {path.split('/')[-1].split('.')[0]} | {b['tokens']} | {a['logp_abs_max']:.1e} | "
          f"{b['logp_abs_mean']:.2f} | {b['logp_abs_max']:.1f} | {b['kl']:.2g} | "
          f"{b['ratio_p01']:.1e} | {b['ratio_min']:.0e} | {b['outside_frac']:.2f} | "
          f"{b['rejected_frac']:.2f} |")
END
