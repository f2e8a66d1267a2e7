"""How good the embedded model's reasoning is apart from the answer's form, under several caches.

    python benchmarks/reasoning.py --limit 512

Greedy; `reward` is the task's, `reasoning` scores the text before a closing check. One JSON line a
cache.
"""

import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import parse  # noqa: E402
from data import gsm8k  # noqa: E402
from errors import run_cli  # noqa: E402
from eval import BATCH, FLAGS, load, load_problems, respond  # noqa: E402

CACHES = (("snapkv", 1.0), ("snapkv", 0.5), ("snapkv", 0.3), ("random", 0.5), ("recent", 0.5))


def main() -> None:
    cfg = parse(["--task", "gsm8k", *sys.argv[1:]], __doc__, FLAGS)
    tok, model = load(cfg)
    encoded = load_problems(cfg, "test", tok)[: cfg.limit]
    for policy, keep in CACHES:
        eviction = dataclasses.replace(cfg.eviction(), policy=policy, keep=keep)
        reward = reasoning = 0.0
        for i in range(0, len(encoded), BATCH):
            part = encoded[i : i + BATCH]
            _, texts, rewards = respond(model, tok, part, cfg, greedy=eviction)
            reward += float(rewards.sum())
            reasoning += sum(gsm8k.reward(text.split(" Check:")[0], p)
                             for (text,), (p, _) in zip(texts, part, strict=True))
        print(json.dumps({"policy": policy, "keep": keep, "n": len(encoded),
                          "reward": reward / len(encoded), "reasoning": reasoning / len(encoded)}),
              flush=True)


if __name__ == "__main__":
    run_cli(main)
