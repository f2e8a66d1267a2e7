"""Greedy accuracy under a full and under an evicted cache, with a 95 % interval.

    python eval.py --task gsm8k                                  # the embedded model
    python eval.py --task gsm8k --model FOLDER --data-dir FOLDER --limit 64

Decoding is `rollout.generate` at temperature 0: what is evaluated is what training samples from.
"""

import dataclasses
import json
import math
import sys

import torch
from torch import Tensor

from config import Config, parse
from data import gsm8k, stories
from errors import BadInput, run_cli
from eviction import DENSE, Eviction
from model import DTYPES, Qwen, load_model
from rollout import Rollout, generate
from tokenizer import Tokenizer

BATCH = 64  # prompts decoded together
SCHEDULE = tuple(f.name for f in dataclasses.fields(Eviction))
FLAGS = ("task", "model", "data_dir", "shots", "limit", "max_prompt", "max_new", "dtype", "device",
         *SCHEDULE)

Encoded = list[tuple[gsm8k.Problem, list[int]]]  # problems with their prompt's token ids


def load(cfg: Config, folder: str | None = None) -> tuple[Tokenizer, Qwen]:
    """Tokenizer and model of a folder; of `cfg.model` or the embedded one if none is named."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward gave NaN with an explicit mask
    folder = folder or cfg.model or str(stories.MODEL)
    tok = Tokenizer.load(folder)
    model = load_model(folder, dtype=DTYPES[cfg.dtype], device=cfg.device)
    if tok.vocab_size > model.cfg.V:
        raise BadInput(f"{folder}: tokenizer of {tok.vocab_size}, model of {model.cfg.V} tokens; "
                       "expected the files of one checkpoint")
    return tok, model


def load_problems(cfg: Config, split: str, tok: Tokenizer) -> Encoded:
    """The task's problems: generated stories for the embedded model, GSM8K for a real one. A prompt
    longer than `max_prompt` is BadInput, never cut."""
    ours = cfg.data_dir == "stories" or (cfg.model is None and cfg.data_dir is None)
    problems = stories.load(split) if ours else gsm8k.load(split, cfg.data_dir, shots=cfg.shots)
    encoded = [(p, tok.chat(p.prompt)) for p in problems]
    for p, ids in encoded:
        if len(ids) > cfg.max_prompt:
            raise BadInput(f"{split} problem {p.index}: prompt of {len(ids)} tokens; expected at "
                           f"most --max-prompt {cfg.max_prompt}; raise it or use fewer --shots")
    if split == "test" and cfg.limit > len(encoded):
        raise BadInput(f"--limit {cfg.limit}: expected at most {len(encoded)}, all test problems")
    return encoded


def respond(model: Qwen, tok: Tokenizer, encoded: Encoded, cfg: Config, *, step: int = 0,
            greedy: Eviction | None = None) -> tuple[Rollout, list[list[str]], Tensor]:
    """Sample groups as the config says, or one greedy response under another cache. Returns the
    rollout, its texts (N, G) without stop tokens, and its rewards (N, G) float32."""
    G, temperature = (1, 0.0) if greedy else (cfg.group, cfg.temperature)
    rollout = generate(model, [ids for _, ids in encoded], sequence=[p.index for p, _ in encoded],
                       G=G, max_new=cfg.max_new, stop_ids=tok.stop_ids, seed=cfg.seed, step=step,
                       eviction=greedy or cfg.eviction(), temperature=temperature)
    texts = [[tok.decode(rollout.tokens[n, g, : rollout.lengths[n, g]].tolist()) for g in range(G)]
             for n in range(len(encoded))]
    rewards = [[gsm8k.reward(text, p) for text in group]
               for group, (p, _) in zip(texts, encoded, strict=True)]
    return rollout, texts, torch.tensor(rewards, device=rollout.lengths.device)


def wilson(k: float, n: int) -> tuple[float, float]:
    """95 % interval of a share k / n (Wilson 1927): stays in [0, 1] and has width at k = 0."""
    z, p = 1.959964, k / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def evaluate(model: Qwen, tok: Tokenizer, encoded: Encoded, cfg: Config) -> dict[str, dict]:
    """For the dense and the evicted cache: greedy accuracy, its interval, n, share truncated."""
    out, n = {}, len(encoded)
    for name, eviction in (("dense", DENSE), ("evicted", cfg.eviction())):
        right = truncated = 0.0
        for i in range(0, n, BATCH):
            rollout, _, rewards = respond(model, tok, encoded[i : i + BATCH], cfg, greedy=eviction)
            right, truncated = right + rewards.sum(), truncated + (~rollout.stopped).sum()
        out[name] = {"accuracy": float(right) / n, "interval": wilson(float(right), n), "n": n,
                     "truncated": float(truncated) / n}
    return out


def describe(results: dict[str, dict]) -> str:
    return "   ".join(f"{name} {x['accuracy']:.3f} [{x['interval'][0]:.3f}, "
                      f"{x['interval'][1]:.3f}]" for name, x in results.items())


def main() -> None:
    cfg = parse(sys.argv[1:], __doc__, FLAGS)
    if cfg.limit == 0:
        raise BadInput("--limit 0: expected at least 1 problem")
    tok, model = load(cfg)
    encoded = load_problems(cfg, "test", tok)[: cfg.limit]
    results = evaluate(model, tok, encoded, cfg)
    print(f"greedy accuracy, n = {len(encoded)}: " + describe(results))
    print(json.dumps({"model": cfg.model, **dataclasses.asdict(cfg.eviction()), **results}))


if __name__ == "__main__":
    run_cli(main)
