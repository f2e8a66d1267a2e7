"""Greedy accuracy under a named cache, with a 95 % interval.

    python eval.py --task gsm8k                                  # the embedded model
    python eval.py --task gsm8k --model FOLDER --data-dir FOLDER --limit 64

Decoding is `rollout.generate` at temperature 0: what is evaluated is what training samples from.
"""

from __future__ import annotations

import argparse
import json
import math

import torch
from tqdm import tqdm

from data import gsm8k, stories
from errors import BadInput, run_cli
from eviction import DENSE, POLICIES, Eviction
from model import DTYPES, Qwen, load_model
from rollout import generate
from tokenizer import Tokenizer

Encoded = list[tuple[gsm8k.Problem, list[int]]]  # problems with their prompt's token ids


def encode(problems: list[gsm8k.Problem], tok: Tokenizer, max_prompt: int) -> Encoded:
    """Prompts in the chat format; one that is too long is an error, never cut."""
    out = [(p, tok.chat(p.prompt)) for p in problems]
    for p, ids in out:
        if len(ids) > max_prompt:
            raise BadInput(f"problem {p.index}: prompt of {len(ids)} tokens; expected at most "
                           f"--max-prompt {max_prompt}; raise it or use fewer --shots")
    return out


def wilson(k: int, n: int) -> tuple[float, float]:
    """95 % interval of a share k / n (Wilson 1927): stays in [0, 1] and has width at k = 0."""
    z, p = 1.959964, k / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def accuracy(model: Qwen, tok: Tokenizer, encoded: Encoded, eviction: Eviction, *, max_new: int,
             batch: int = 64, progress: bool = False) -> dict:
    """Share of problems whose greedy answer is right.

    Returns:
        accuracy, low, high (95 % interval), n, and truncated: the share without a stop token.
    """
    right = truncated = 0
    for i in tqdm(range(0, len(encoded), batch), desc="eval", disable=not progress, leave=False):
        part = encoded[i : i + batch]
        rollout = generate(model, [ids for _, ids in part], sequence=[p.index for p, _ in part],
                           G=1, max_new=max_new, stop_ids=tok.stop_ids, eviction=eviction,
                           temperature=0.0)
        texts = completions(rollout, tok)
        right += sum(gsm8k.reward(text[0], p) for text, (p, _) in zip(texts, part, strict=True))
        truncated += int((~rollout.stopped).sum())
    n = len(encoded)
    low, high = wilson(int(right), n)
    return {"accuracy": right / n, "low": low, "high": high, "n": n, "truncated": truncated / n}


def completions(rollout, tok: Tokenizer) -> list[list[str]]:
    """The text of each sample, (N, G); the stop token is a control token and leaves no text."""
    return [[tok.decode(ids[:length]) for ids, length in zip(group, lengths, strict=True)]
            for group, lengths in zip(rollout.tokens.tolist(), rollout.lengths.tolist(),
                                      strict=True)]


def describe(name: str, result: dict) -> str:
    return (f"{name} {result['accuracy']:.3f} [{result['low']:.3f}, {result['high']:.3f}] "
            f"(n = {result['n']})")


def load_problems(task: str, split: str, model: str | None, data_dir: str | None,
                  shots: int) -> list[gsm8k.Problem]:
    """The task's problems: generated stories for the embedded model, GSM8K for a real one."""
    assert task == "gsm8k", task
    if model is None and data_dir is None:
        return stories.load(split)
    return gsm8k.load(split, data_dir, shots=shots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--task", choices=["gsm8k"], required=True)
    parser.add_argument("--model", help="checkpoint folder (default: the embedded model)")
    parser.add_argument("--data-dir", help="folder with test.jsonl (default: downloaded once)")
    parser.add_argument("--limit", type=int, default=256, help="problems (default 256)")
    parser.add_argument("--shots", type=int, default=0, help="solved examples before a question")
    parser.add_argument("--max-prompt", type=int, default=1024, help="tokens (default 1024)")
    parser.add_argument("--max-new", type=int, help="tokens (default 64 embedded, 300 real)")
    parser.add_argument("--policy", choices=list(POLICIES), default="snapkv")
    parser.add_argument("--keep", type=float, default=0.5, help="share of the prompt's keys kept")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default float32 embedded, else bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64, help="prompts decoded together")
    args = parser.parse_args()
    caches = {"dense": DENSE, f"{args.policy} keep {args.keep:g}": Eviction(args.policy, args.keep)}
    problems = load_problems(args.task, "test", args.model, args.data_dir, args.shots)
    folder = args.model or str(stories.MODEL)
    dtype = DTYPES[args.dtype or ("bfloat16" if args.model else "float32")]
    tok, model = Tokenizer.load(folder), load_model(folder, dtype=dtype, device=args.device)
    if not 1 <= args.limit <= len(problems):
        raise BadInput(f"--limit {args.limit}: expected 1 to {len(problems)} problems")
    encoded = encode(problems[: args.limit], tok, args.max_prompt)
    for name, eviction in caches.items():
        result = accuracy(model, tok, encoded, eviction, progress=True, batch=args.batch,
                          max_new=args.max_new or (300 if args.model else 64))
        print(describe(name, result))
        print(json.dumps({"cache": name, "model": folder, **result}))


if __name__ == "__main__":
    torch.backends.cuda.enable_cudnn_sdp(False)
    run_cli(main)
