"""How far the learner's log-probs are from the sampler's, with and without the shadow mask.

    python benchmarks/mismatch.py --task gsm8k --policy snapkv --keep 0.5 --dtype fp32
    python benchmarks/mismatch.py --task gsm8k --model FOLDER --data-dir FOLDER --dtype bf16

Prints one JSON line a learner. `shadow` replays the record of the rollout, `dense` ignores it;
`rejected_frac` is the share of samples that Sparse-RL would leave out.
`--grid` does so for snapkv, recent, random and h2o, each at keep 0.7, 0.5 and 0.3.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import eval as evaluation  # noqa: E402
from config import Config, flag, parse  # noqa: E402
from errors import run_cli  # noqa: E402
from eval import Encoded, load, load_problems, respond  # noqa: E402
from grpo import group_terms, mismatch, sparse_rl  # noqa: E402
from model import Qwen  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

FLAGS = (*evaluation.FLAGS, "prompts", "group", "temperature", "grid")
GRID = [(policy, keep) for policy in ("snapkv", "recent", "random", "h2o")
        for keep in (0.7, 0.5, 0.3)]


@dataclasses.dataclass(frozen=True)
class Flags(Config):
    prompts: int = flag(4, "prompts")
    max_new: int = flag(96, "longest response, tokens")
    grid: bool = flag(False, "four policies at three shares")


def main() -> None:
    cfg = parse(sys.argv[1:], __doc__, FLAGS, Flags)
    tok, model = load(cfg)
    encoded = load_problems(cfg, "test", tok)[: cfg.prompts]
    for policy, keep in GRID if cfg.grid else [(cfg.policy, cfg.keep)]:
        measure(model, tok, encoded, dataclasses.replace(cfg, policy=policy, keep=keep))


def measure(model: Qwen, tok: Tokenizer, encoded: Encoded, cfg: Flags) -> None:
    start = time.perf_counter()
    rollout, _, _ = respond(model, tok, encoded, cfg)
    row = {"task": cfg.task, "dtype": cfg.dtype, **dataclasses.asdict(cfg.eviction()),
           "prompt_tokens": [len(ids) for _, ids in encoded], "tokens": int(rollout.mask.sum()),
           "kv_bytes": rollout.kv_bytes_peak, "kv_bytes_dense": rollout.kv_bytes_dense,
           "rollout_sec": round(time.perf_counter() - start, 1)}
    for learner in ("shadow", "dense"):
        start, learnt = time.perf_counter(), rollout.logp.clone()
        with torch.no_grad():
            for n in range(len(encoded)):
                logp, _, _, mask = group_terms(
                    model, rollout, n, slice(0, cfg.group), temperature=cfg.temperature,
                    distil=False, replay=learner == "shadow")
                learnt[n, :, : mask.shape[1]][mask] = logp
        figures = mismatch((learnt - rollout.logp)[rollout.mask])
        rejected = float(sparse_rl(learnt, rollout)[1].float().mean())
        print(json.dumps({**row, "learner": learner, "rejected_frac": rejected,
                          **{key.removeprefix("mismatch/"): x for key, x in figures.items()},
                          "learner_sec": round(time.perf_counter() - start, 1)}), flush=True)


if __name__ == "__main__":
    run_cli(main)
