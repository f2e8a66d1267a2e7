"""How far the learner's log-probs are from the sampler's, with and without the shadow mask.

    python benchmarks/mismatch.py --task gsm8k --policy snapkv --keep 0.5 --dtype float32
    python benchmarks/mismatch.py --task gsm8k --model FOLDER --data-dir FOLDER --dtype bfloat16

Prints one JSON line a learner. `shadow` replays the record of the rollout, `dense` ignores it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data import stories  # noqa: E402
from errors import run_cli  # noqa: E402
from eval import encode, load_problems  # noqa: E402
from eviction import POLICIES, Eviction  # noqa: E402
from grpo import group_terms, mismatch  # noqa: E402
from model import DTYPES, load_model  # noqa: E402
from rollout import generate  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--task", choices=["gsm8k"], default="gsm8k")
    parser.add_argument("--model", help="checkpoint folder (default: the embedded model)")
    parser.add_argument("--data-dir", help="folder with test.jsonl (default: downloaded once)")
    parser.add_argument("--shots", type=int, default=0, help="solved examples before a question")
    parser.add_argument("--policy", choices=list(POLICIES), default="snapkv")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the prompt's keys kept")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="samples a prompt")
    parser.add_argument("--max-new", type=int, default=96, help="tokens a sample, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    eviction = Eviction(args.policy, args.keep, seed=args.seed)
    folder = args.model or str(stories.MODEL)
    tok = Tokenizer.load(folder)
    model = load_model(folder, dtype=DTYPES[args.dtype], device=args.device)
    problems = load_problems(args.task, "test", args.model, args.data_dir, args.shots)
    encoded = encode(problems[: args.prompts], tok, 10**9)
    start = time.perf_counter()
    rollout = generate(model, [ids for _, ids in encoded], G=args.group, max_new=args.max_new,
                       sequence=[p.index for p, _ in encoded], stop_ids=tok.stop_ids,
                       eviction=eviction, seed=args.seed)
    shared = {"task": args.task, "policy": args.policy, "keep": args.keep, "dtype": args.dtype,
              "tokens": int(rollout.mask.sum()), "kv_bytes": rollout.kv_bytes_peak,
              "kv_bytes_dense": rollout.kv_bytes_dense,
              "rollout_sec": round(time.perf_counter() - start, 1)}
    for learner in ("shadow", "dense"):
        start, difference = time.perf_counter(), []
        with torch.no_grad():
            for n in range(args.prompts):
                logp, _, _, mask = group_terms(
                    model, rollout, n, slice(0, args.group), temperature=1.0, distil=False,
                    replay=learner == "shadow")
                sampled = rollout.logp[n, :, : mask.shape[1]][mask]
                difference.append(logp - sampled)
        figures = {key.removeprefix("mismatch/"): value
                   for key, value in mismatch(torch.cat(difference)).items()}
        print(json.dumps({**shared, "learner": learner, **figures,
                          "learner_sec": round(time.perf_counter() - start, 1)}), flush=True)


if __name__ == "__main__":
    run_cli(main)
