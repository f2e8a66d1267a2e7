"""How well the embedded model reasons, apart from the answer's form, under every kind of cache.

    python benchmarks/reasoning.py --limit 512

Greedy; `reward` is the task's, `reasoning` scores the text before a closing check, with its 95 %
interval; `KV` is the peak of key and value bytes, as a share of the dense cache's.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import parse  # noqa: E402
from data import gsm8k  # noqa: E402
from errors import BadInput, run_cli  # noqa: E402
from eval import BATCH, load, load_problems, respond, wilson  # noqa: E402
from eviction import DENSE, POLICIES, Eviction  # noqa: E402

CACHES = {"dense": DENSE} | {
    f"recent, keep {keep}, sinks {sinks}": Eviction("recent", keep, sinks=sinks)
    for keep in (0.75, 0.5) for sinks in (4, 0)
} | {f"{policy}, keep 0.5": Eviction(policy, 0.5) for policy in POLICIES if policy != "recent"} | {
    f"{policy}, budget 96 every 16": Eviction(policy, 1.0, budget=96, evict_every=16, window=16)
    for policy in POLICIES
} | {
    "snapkv, keep 0.3": Eviction("snapkv", 0.3),
    "snapkv, keep 0.5, pyramid": Eviction("snapkv", 0.5, layer_budget="pyramid"),
    "snapkv, keep 0.5, chunks of 64": Eviction("snapkv", 0.5, prefill_chunk=64),
    "snapkv, keep 0.5, budget 96 every 16": Eviction("snapkv", 0.5, budget=96, evict_every=16),
}


FLAGS = ("limit", "max_prompt", "max_new", "dtype", "device")


def main() -> None:
    cfg = parse(sys.argv[1:], __doc__, FLAGS)
    if cfg.limit == 0:
        raise BadInput("--limit 0: expected at least 1 problem")
    tok, model = load(cfg)
    encoded, start = load_problems(cfg, "test", tok)[: cfg.limit], time.perf_counter()
    print(f"{'cache':38}{'reward':>7}{'reasoning':>11}{'interval':>16}{'KV':>7}   n={len(encoded)}")
    for name, eviction in CACHES.items():
        reward = right = peak = dense = 0.0
        for i in range(0, len(encoded), BATCH):
            part = encoded[i : i + BATCH]
            rollout, texts, rewards = respond(model, tok, part, cfg, greedy=eviction)
            reward += float(rewards.sum())
            right += sum(gsm8k.reward(text.split(" Check:")[0], p)
                         for (text,), (p, _) in zip(texts, part, strict=True))
            peak, dense = peak + rollout.kv_bytes_peak, dense + rollout.kv_bytes_dense
        n, (low, high) = len(encoded), wilson(right, len(encoded))
        print(f"{name:38}{reward / n:7.3f}{right / n:11.3f}{f'[{low:.3f}, {high:.3f}]':>16}"
              f"{peak / dense:7.2f}", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    run_cli(main)
