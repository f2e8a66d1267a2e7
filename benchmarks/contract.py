"""The contract, in a table: the learner under the shadow mask computes what the sampler computed.

    python benchmarks/contract.py

Every policy under every schedule, on the embedded model and on random ones with 1, 2 and 7 query
heads a KV head; three prompts of unlike lengths, groups of 3, in float64. Prints for each policy
and schedule the largest |rollout_logp - learner_logp| with the replayed mask (bound 1e-9) and the
smallest, over the models, of the largest with the dense learner (must exceed 1e-2). Exits with
status 1 if a cell is outside. The embedded model samples at temperature 2: where it is certain of
a token, the log-prob is 0 under any mask.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data import stories  # noqa: E402
from eviction import NEVER, POLICIES, Eviction  # noqa: E402
from grpo import group_terms  # noqa: E402
from model import ModelConfig, Qwen, load_model  # noqa: E402
from rollout import generate  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

BOUND, CONTROL = 1e-9, 1e-2
SAMPLES, TOKENS = 3, 48
SCHEDULES = {
    "keep 0.5": {"keep": 0.5},
    "budget 32 every 1": {"keep": 1.0, "budget": 32, "evict_every": 1},
    "budget 32 every 8": {"keep": 1.0, "budget": 32, "evict_every": 8},
    "budget 32, chunks of 16": {"keep": 1.0, "budget": 32, "evict_every": 8, "prefill_chunk": 16},
    "pyramid, keep 0.5": {"keep": 0.5, "layer_budget": "pyramid"},
    "pyramid, budget 32": {"keep": 1.0, "budget": 32, "evict_every": 8, "prefill_chunk": 16,
                           "layer_budget": "pyramid"},
}


def random_model(groups: int, *, kind: str = "qwen3", L: int = 3) -> Qwen:
    """A random model in float64 with sharp attention and `groups` query heads a KV head."""
    hf = {"model_type": kind, "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": L,
          "num_attention_heads": 2 * groups, "num_key_value_heads": 2, "head_dim": 8,
          "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 100.0,
          "tie_word_embeddings": True}
    model, draw = Qwen(ModelConfig.from_hf(hf)).double(), torch.Generator().manual_seed(groups)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=draw, dtype=p.dtype)
        p.data = noise / p.shape[-1] ** 0.5 if p.ndim == 2 else 1 + 0.2 * noise
        if "q_norm" in name or "k_norm" in name:
            p.data += 0.5
    return model


def models() -> Iterator[tuple[str, Qwen, list[list[int]], float]]:
    """Name, model, three prompts and sampling temperature."""
    tok = Tokenizer.load(stories.MODEL)
    prompts = [tok.chat(stories.problem("test", i).prompt) for i in range(2)]
    yield ("embedded", load_model(stories.MODEL, dtype=torch.float64),
           [prompts[0][-40:], prompts[0], prompts[1]], 2.0)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(40, (P,), generator=draw).tolist() for P in (20, 45, 100)]
    for groups in (1, 2, 7):
        yield f"random, {groups} to 1", random_model(groups), prompts, 1.0


def cell(model: Qwen, prompts: list[list[int]], eviction: Eviction, temperature: float = 1.0, *,
         G: int = SAMPLES, R: int = TOKENS) -> tuple[float, float, int]:
    """Largest difference of log-probs with the replayed mask and with the dense learner, and how
    many keys were evicted. A dense difference counts where its group lost a key."""
    rollout = generate(model, prompts, sequence=range(len(prompts)), G=G, max_new=R,
                       stop_ids=frozenset(), eviction=eviction, temperature=temperature)
    shadow, dense = [0.0], [0.0]
    for n, record in enumerate(rollout.evict_at):
        for replay, found in ((True, shadow), (False, dense)):
            with torch.no_grad():
                logp, *_, mask = group_terms(model, rollout, n, slice(0, G), distil=False,
                                             temperature=temperature, replay=replay)
            found.append(float((logp - rollout.logp[n][mask]).abs().max()))
        if (record == NEVER).all():
            assert dense.pop() <= BOUND, "nothing was evicted"
    return max(shadow), max(dense), sum(int((x != NEVER).sum()) for x in rollout.evict_at)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.split("\n", 1)[0]).parse_args()
    start, bad, every = time.perf_counter(), 0, list(models())
    print(f"models: {', '.join(name for name, *_ in every)}")
    print(f"{'policy':9}{'schedule':25}{'shadow':>9}{'dense':>9}{'keys evicted':>14}")
    for policy in POLICIES:
        for schedule, options in SCHEDULES.items():
            eviction = Eviction(policy, window=8, seed=1, **options)
            cells = [cell(model, prompts, eviction, temperature)
                     for _, model, prompts, temperature in every]
            shadow, dense = max(x[0] for x in cells), min(x[1] for x in cells)
            fine = shadow <= BOUND and dense > CONTROL and all(x[2] for x in cells)
            bad += not fine
            print(f"{policy:9}{schedule:25}{shadow:9.0e}{dense:9.2f}{sum(x[2] for x in cells):14,}"
                  + ("" if fine else "   <- OUTSIDE"), flush=True)
    print(f"{bad} of {len(POLICIES) * len(SCHEDULES)} rows outside the bounds "
          f"(shadow <= {BOUND:g}, dense > {CONTROL:g}); {time.perf_counter() - start:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
