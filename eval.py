"""Greedy accuracy under a full and under an evicted cache, with a 95 % interval.

    python eval.py --task gsm8k                                  # the embedded model
    python eval.py --task gsm8k --model FOLDER --data-dir FOLDER --limit 64

Decoding is `rollout.generate` at temperature 0: what is evaluated is what training samples from.
"""

import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import lora
from config import Config, parse
from data import TASKS, stories, texts
from data.files import Problem
from errors import BadInput, read_json, run_cli
from eviction import DENSE, Eviction
from model import DTYPES, Qwen, find_checkpoint, load_model
from rollout import Rollout, generate
from tokenizer import Tokenizer

BATCH = 64  # prompts decoded together
SCHEDULE = tuple(f.name for f in dataclasses.fields(Eviction))
FLAGS = ("task", "model", "data_dir", "shots", "thinking", "limit", "max_prompt", "max_new",
         "dtype", "device", *SCHEDULE)

Encoded = list[tuple[Problem, list[int]]]  # problems with their prompt's token ids


def load(cfg: Config, folder: Path | None = None) -> tuple[Tokenizer, Qwen]:
    """Tokenizer and model of a folder, or of adapters and their base; of `cfg.model` or the
    embedded one if none is named."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward gave NaN with an explicit mask
    folder = folder or find_checkpoint(cfg.model or str(stories.MODEL))
    tok, base = Tokenizer.load(folder), folder
    adapted = (folder / lora.CONFIG).is_file()
    if adapted:
        base = find_checkpoint(str(read_json(folder / lora.CONFIG).get("base_model_name_or_path")))
    model = load_model(base, dtype=DTYPES[cfg.dtype], device=cfg.device)
    if adapted:
        lora.load_adapters(model, folder)
    if tok.vocab_size > model.cfg.V:
        raise BadInput(f"{folder}: tokenizer of {tok.vocab_size}, model of {model.cfg.V} tokens; "
                       "expected the files of one checkpoint")
    return tok, model


def load_problems(cfg: Config, split: str, tok: Tokenizer) -> Encoded:
    """The task's problems: generated ones for the embedded model, else real ones. A document that
    makes a prompt longer than `max_prompt` is cut at its end; nothing else ever is (BadInput)."""
    if cfg.shots and cfg.task != "gsm8k":
        raise BadInput(f"--shots {cfg.shots}: only --task gsm8k has solved examples; leave it out")
    ours = cfg.data_dir == "stories" or (cfg.model is None and cfg.data_dir is None)
    if ours and cfg.shots:
        raise BadInput(f"--shots {cfg.shots}: the generated problems have their own; leave it out")
    if ours:
        problems = stories.load(split) if cfg.task == "gsm8k" else texts.load(cfg.task, split)
    else:
        problems = TASKS[cfg.task].load(split, cfg.data_dir, shots=cfg.shots)
    encoded, cut = [], 0
    for p in problems:
        ids = tok.chat(p.prompt, thinking=cfg.thinking)
        if p.document and len(ids) > cfg.max_prompt:
            document, cut = tok.encode(p.document), cut + 1
            room = len(document) - (len(ids) - cfg.max_prompt)
            while room > 0 and len(ids) > cfg.max_prompt:  # at the seam tokens may merge otherwise
                p = dataclasses.replace(p, document=tok.decode(document[:room]).rstrip("\ufffd"))
                ids, room = tok.chat(p.prompt, thinking=cfg.thinking), room - 1
        if len(ids) > cfg.max_prompt:
            raise BadInput(f"{split} problem {p.index}: prompt of {len(ids)} tokens; expected at "
                           f"most --max-prompt {cfg.max_prompt}; raise it"
                           + (" or use fewer --shots" if cfg.shots else ""))
        encoded.append((p, ids))
    if cut:
        print(f"{cut} of {len(encoded)} {split} documents cut to --max-prompt {cfg.max_prompt}")
    if split == "test" and cfg.limit > len(encoded):
        raise BadInput(f"--limit {cfg.limit}: expected at most {len(encoded)}, all test problems")
    return encoded


def worth(score: Callable[[str, Problem], float], text: str, p: Problem) -> float:
    """A reward or metric; NaN if it raises or gives no number."""
    try:
        value = float(score(text, p))
        return value if math.isfinite(value) else math.nan
    except Exception as e:  # whatever a user's reward may raise: one sample is lost, not the run
        warnings.warn(f"a score raised {e!r}: without a reward a sample abstains, without a metric "
                      "an answer counts 0", stacklevel=2)
        return math.nan


def respond(model: Qwen, tok: Tokenizer, encoded: Encoded, cfg: Config, *, step: int = 0,
            greedy: Eviction | None = None) -> tuple[Rollout, list[list[str]], Tensor]:
    """Sample groups as the config says, or one greedy response under another cache. Returns the
    rollout, its texts (N, G) without stop tokens, and its rewards (N, G) float32."""
    G, temperature = (1, 0.0) if greedy else (cfg.group, cfg.temperature)
    sampling = DENSE if cfg.method == "dense" else cfg.eviction()
    rollout = generate(model, [ids for _, ids in encoded], sequence=[p.index for p, _ in encoded],
                       G=G, max_new=cfg.max_new, stop_ids=tok.stop_ids, seed=cfg.seed, step=step,
                       eviction=greedy or sampling, temperature=temperature)
    texts = [[tok.decode(rollout.tokens[n, g, : rollout.lengths[n, g]].tolist()) for g in range(G)]
             for n in range(len(encoded))]
    rewards = [[worth(TASKS[cfg.task].reward, text, p) for text in group]
               for group, (p, _) in zip(texts, encoded, strict=True)]
    return rollout, texts, torch.tensor(rewards, device=rollout.lengths.device)


def wilson(k: float, n: int) -> tuple[float, float]:
    """95 % interval of a share k / n (Wilson 1927): stays in [0, 1] and has width at k = 0. For the
    mean of scores in [0, 1] it is rather too wide."""
    z, p = 1.959964, k / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def evaluate(model: Qwen, tok: Tokenizer, encoded: Encoded, cfg: Config) -> dict[str, dict]:
    """For the dense and the evicted cache, greedy: means of the task's metrics, the interval of the
    first, its `scores` problem by problem, n, share truncated."""
    out, n = {}, len(encoded)
    for name, eviction in (("dense", DENSE), ("evicted", cfg.eviction())):
        rows, truncated = [], 0.0
        for i in range(0, n, BATCH):
            part = encoded[i : i + BATCH]
            rollout, answers, _ = respond(model, tok, part, cfg, greedy=eviction)
            rows += [(text, p) for (text,), (p, _) in zip(answers, part, strict=True)]
            truncated += float((~rollout.stopped).sum())
        scores = {key: [0.0 if math.isnan(x := worth(metric, *row)) else x for row in rows]
                  for key, metric in TASKS[cfg.task].METRICS.items()}
        main = next(iter(scores))
        out[name] = {**{key: sum(x) / n for key, x in scores.items()}, "truncated": truncated / n,
                     "interval": wilson(sum(scores[main]), n), "n": n,
                     "scores": [round(x, 4) for x in scores[main]]}
    return out


def describe(results: dict[str, dict]) -> str:
    """`dense 0.938 [0.901, 0.961]   evicted ...`: the main metric."""
    return "   ".join(f"{name} {next(iter(x.values())):.3f} [{x['interval'][0]:.3f}, "
                      f"{x['interval'][1]:.3f}]" for name, x in results.items())


def main() -> None:
    cfg = parse(sys.argv[1:], __doc__, FLAGS)
    if cfg.limit == 0:
        raise BadInput("--limit 0: expected at least 1 problem")
    tok, model = load(cfg)
    encoded = load_problems(cfg, "test", tok)[: cfg.limit]
    results = evaluate(model, tok, encoded, cfg)
    print(f"greedy {next(iter(results['dense']))}, n = {len(encoded)}: " + describe(results))
    print(json.dumps({"model": cfg.model, **dataclasses.asdict(cfg.eviction()), **results}))


if __name__ == "__main__":
    run_cli(main)
