"""Train with Shadow Mask Distillation: `python train.py --task gsm8k`.

The loop, once a step: sample a batch of groups under the evicting cache (`rollout`), reward them
(`data/`), accumulate the gradient of the replayed pass (`grpo`), update (`optim`), log. A run
writes out/<run>/: config.json, metrics.jsonl (a line a step), samples.jsonl, summary.json, and the
last checkpoint, a Hugging Face folder with the optimiser's state.

Invariant: what step s does is a function of the weights, the seed and s. A run that was killed and
resumed therefore equals the uninterrupted one, and evaluation changes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
import time
import typing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import gsm8k, stories
from errors import BadInput, run_cli
from eval import accuracy, completions, describe, encode, load_problems
from eviction import DENSE, POLICIES, Eviction
from grpo import LOSSES, Objective, advantages, backward
from model import DTYPES, Qwen, load_model, save_model
from optim import MasterAdamW
from rollout import Rollout, generate
from tokenizer import Tokenizer

MAX_BAD_STEPS = 10  # non-finite steps in a row that end a run


def flag(default, help: str, choices: typing.Sequence[str] | None = None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class Config:
    """Every flag of `train.py`. None = resolved by `resolve`, see `DEFAULTS`."""

    task: str = flag("gsm8k", "what to learn", ["gsm8k"])
    model: str | None = flag(None, "Qwen checkpoint folder; the embedded model if not given")
    data_dir: str | None = flag(None, "folder with train.jsonl, test.jsonl; else downloaded")
    shots: int = flag(0, "solved examples before each question of a real data set")
    out: str | None = flag(None, "folder of the run; out/<task>-<time> if not given")
    resume: bool = flag(False, "continue the run in --out")
    overwrite: bool = flag(False, "delete what is in --out first")
    seed: int = flag(0, "seed of prompts, samples and the random policy")
    steps: int | None = flag(None, "optimiser steps")
    prompts: int = flag(8, "prompts a step")
    group: int = flag(8, "samples a prompt")
    max_prompt: int = flag(1024, "longest prompt, tokens; a longer one is an error")
    max_new: int | None = flag(None, "longest response, tokens")
    temperature: float = flag(1.0, "of sampling, replayed by the learner")
    policy: str = flag("snapkv", "eviction policy", list(POLICIES))
    keep: float = flag(0.5, "share of a prompt's keys kept, in (0, 1]")
    sinks: int = flag(4, "first positions that are never evicted")
    window: int = flag(32, "newest prompt positions that are never evicted")
    lam: float | None = flag(None, "weight of the distillation KL")
    loss: str = flag("dapo", "token weighting", list(LOSSES))
    eps_low: float = flag(0.2, "lower clip of the ratio")
    eps_high: float = flag(0.2, "upper clip of the ratio")
    lr: float | None = flag(None, "learning rate of AdamW, constant")
    max_grad_norm: float = flag(1.0, "gradient norm to clip to")
    micro_samples: int = flag(0, "samples of a group in one backward pass; 0 = all")
    checkpointing: bool | None = flag(None, "recompute blocks in the backward pass")
    control: bool | None = flag(None, "also reward the untrained model on each step's prompts")
    dtype: str | None = flag(None, "of weights and products", list(DTYPES))
    device: str = flag("auto", "auto, cpu, cuda or mps", ["auto", "cpu", "cuda", "mps"])
    eval_n: int = flag(256, "test problems before and after training; 0 = none")
    eval_every: int = flag(20, "steps between evaluations on --eval-during problems; 0 = none")
    eval_during: int = flag(64, "test problems of an evaluation during training")
    save_every: int = flag(20, "steps between checkpoints; 0 = only the last")

    def __post_init__(self) -> None:
        least = {"group": 2, "prompts": 1, "max_prompt": 1, "max_new": 1, "steps": 0, "eval_n": 0,
                 "eval_every": 0, "eval_during": 1, "save_every": 0, "micro_samples": 0, "shots": 0,
                 "seed": 0, "lam": 0, "lr": 0, "eps_low": 0, "eps_high": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                why = "; a group of 1 has no advantage" if name == "group" else ""
                raise BadInput(f"--{name.replace('_', '-')} {value}: expected at least {low}{why}")
        for name in ("temperature", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise BadInput(f"--{name.replace('_', '-')} {getattr(self, name)}: expected a "
                               "positive number")
        if self.resume and (self.out is None or self.overwrite):
            raise BadInput("--resume: expected --out with the folder of a run, and no --overwrite")
        self.eviction()

    def eviction(self) -> Eviction:
        return Eviction(self.policy, self.keep, self.sinks, self.window, self.seed)

    def objective(self) -> Objective:
        return Objective(self.loss, self.lam, self.eps_low, self.eps_high, self.temperature,
                         self.micro_samples)


# What a flag that was not given becomes: (embedded model, real model).
DEFAULTS = {"steps": (60, 200), "max_new": (64, 300), "lam": (0.1, 0.1), "lr": (1e-4, 1e-6),
            "checkpointing": (False, True), "control": (True, False),
            "dtype": ("float32", "bfloat16")}


def resolve(cfg: Config) -> Config:
    column = 0 if cfg.model is None else 1
    given = {name: values[column] for name, values in DEFAULTS.items()
             if getattr(cfg, name) is None}
    if cfg.device == "auto":
        given["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.out is None:
        stem = name = f"out/{cfg.task}-{time.strftime('%Y%m%d-%H%M%S')}"
        n = 1
        while Path(name).exists():
            n += 1
            name = f"{stem}-{n}"
        given["out"] = name
    return dataclasses.replace(cfg, **given)


def parse(argv: list[str]) -> Config:
    """Flags are the fields of `Config` in kebab-case; an unknown one is an error."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    types = typing.get_type_hints(Config)
    for f in dataclasses.fields(Config):
        kind = next(t for t in typing.get_args(types[f.name]) or (types[f.name],)
                    if t is not type(None))
        text = f.metadata["help"]
        if f.name in DEFAULTS:
            text += " (embedded {}, real model {})".format(*DEFAULTS[f.name])
        name = "--" + f.name.replace("_", "-")
        if kind is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=f.default,
                                help=text)
        else:
            parser.add_argument(name, type=kind, default=f.default, help=text,
                                choices=f.metadata["choices"], required=f.name == "task")
    return Config(**vars(parser.parse_args(argv)))


# ---- what a run writes --------------------------------------------------------------------------


def open_run(cfg: Config) -> Path:
    """Create, or check, the folder of the run."""
    out = Path(cfg.out)
    try:
        if cfg.resume:
            saved = json.loads((out / "config.json").read_text(encoding="utf-8"))
            for name, value in dataclasses.asdict(cfg).items():
                if name in ("steps", "resume", "overwrite", "out") or saved.get(name) == value:
                    continue
                raise BadInput(f"--resume: {out} was run with {name} = {saved.get(name)!r}, got "
                               f"{value!r}; give the same flags (only --steps may change)")
            return out
        if out.exists() and any(out.iterdir()):
            if not cfg.overwrite or not (out / "config.json").exists():
                raise BadInput(f"--out {out}: exists already; continue a run with --resume, "
                               "replace it with --overwrite, or name another folder")
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        config = {**dataclasses.asdict(cfg), "commit": _commit(), "torch": torch.__version__}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, json.JSONDecodeError) as e:
        raise BadInput(f"--out {out}: cannot be {'resumed' if cfg.resume else 'written'} ({e}); "
                       "name a folder that can") from None
    return out


def _commit() -> str:
    """The commit of this code, "-dirty" if changed; "unknown" outside a git checkout."""
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty"], text=True, check=True,
                              cwd=Path(__file__).parent, capture_output=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def save_checkpoint(out: Path, step: int, model: Qwen, tok: Tokenizer, optim: MasterAdamW,
                    state: dict) -> None:
    """Written aside and renamed, so a kill or a full disk leaves the previous one valid."""
    aside, final = out / "checkpoint.tmp", out / f"checkpoint-{step:06d}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    save_model(model, aside)
    tok.save(aside)
    torch.save({"step": step, "optim": optim.state_dict(), **state}, aside / "trainer.pt")
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    for old in out.glob("checkpoint-*"):
        if old != final:
            shutil.rmtree(old)


def last_checkpoint(out: Path) -> Path:
    found = sorted(out.glob("checkpoint-*"))
    if not found:
        raise BadInput(f"--resume: {out} holds no checkpoint; start it again with --overwrite")
    return found[-1]


def keep_lines(path: Path, steps: int) -> None:
    """Drop the log lines of steps that will be done again after a resume."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [x for x in lines if x.endswith("\n") and json.loads(x)["step"] <= steps]
        path.write_text("".join(kept), encoding="utf-8")


def append(path: Path, rows: list[dict]) -> None:
    with path.open("a", encoding="utf-8") as f:
        f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@contextlib.contextmanager
def phase(device: str):
    """Measure a phase: `sec`, and peak `bytes` (CUDA: allocated by torch; Linux: resident set of
    the process, the model included; elsewhere 0 = unknown)."""
    status, seen, start = Path("/proc/self/status"), {"bytes": 0}, time.perf_counter()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    yield seen
    if device == "cuda":
        torch.cuda.synchronize()
        seen["bytes"] = torch.cuda.max_memory_allocated()
    elif status.exists():
        seen["bytes"] = 1024 * int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1])
    seen["sec"] = time.perf_counter() - start


# ---- the loop -----------------------------------------------------------------------------------


def batch_of_step(encoded: list, cfg: Config, step: int) -> list:
    """The prompts of a step: the data in a new order each epoch, a function of (seed, step)."""
    places = range(step * cfg.prompts, (step + 1) * cfg.prompts)
    order = {epoch: np.random.default_rng([cfg.seed, epoch]).permutation(len(encoded))
             for epoch in {place // len(encoded) for place in places}}
    return [encoded[order[place // len(encoded)][place % len(encoded)]] for place in places]


def sample(model: Qwen, tok: Tokenizer, batch: list, cfg: Config, step: int,
           ) -> tuple[Rollout, list[list[str]], torch.Tensor]:
    """Rollout of a step's prompts, its texts and rewards (N, G)."""
    rollout = generate(model, [ids for _, ids in batch], sequence=[p.index for p, _ in batch],
                       G=cfg.group, max_new=cfg.max_new, stop_ids=tok.stop_ids, step=step,
                       eviction=cfg.eviction(), temperature=cfg.temperature, seed=cfg.seed)
    texts = completions(rollout, tok)
    rewards = [[gsm8k.reward(text, p) for text in group]
               for group, (p, _) in zip(texts, batch, strict=True)]
    return rollout, texts, torch.tensor(rewards, device=rollout.lengths.device)


def train_step(model: Qwen, optim: MasterAdamW, tok: Tokenizer, batch: list, cfg: Config,
               step: int) -> tuple[dict, list[dict]]:
    """One update; returns its metrics and its samples."""
    with phase(cfg.device) as rolled:
        rollout, texts, rewards = sample(model, tok, batch, cfg, step)
    with phase(cfg.device) as learned:
        metrics = backward(model, rollout, rewards, cfg.objective())
        norm = optim.step(finite=math.isfinite(metrics["loss"]))
    tokens = int(rollout.lengths.sum())
    metrics |= {
        "reward/mean": float(rewards.mean()), "grad/norm": norm,
        "step/skipped": int(not (math.isfinite(norm) and math.isfinite(metrics["loss"]))),
        "len/mean_tok": tokens / rollout.lengths.numel(),
        "len/truncated_frac": float((~rollout.stopped).float().mean()),
        "kv/bytes_peak": rollout.kv_bytes_peak, "kv/bytes_dense": rollout.kv_bytes_dense,
        "mem/rollout_bytes_peak": rolled["bytes"], "mem/learner_bytes_peak": learned["bytes"],
        "time/rollout_sec": rolled["sec"], "time/learn_sec": learned["sec"],
        "tok/rollout_per_sec": tokens / rolled["sec"],
        "tok/learn_per_sec": metrics.pop("tok/learn") / learned["sec"],
    }
    advantage = advantages(rewards, scale=cfg.loss != "dr_grpo")
    samples = [{"step": step + 1, "problem": p.index, "sample": g, "prompt": p.prompt,
                "completion": texts[n][g], "reward": float(rewards[n, g]),
                "advantage": float(advantage[n, g]), "prompt_tok": len(ids),
                "response_tok": int(rollout.lengths[n, g]),
                "stopped": bool(rollout.stopped[n, g])}
               for n, (p, ids) in enumerate(batch) for g in range(cfg.group)]
    return metrics, samples


def evaluate(model: Qwen, tok: Tokenizer, encoded: list, cfg: Config) -> dict:
    return {name: accuracy(model, tok, encoded, eviction, max_new=cfg.max_new)
            for name, eviction in (("dense", DENSE), ("evicted", cfg.eviction()))}


def run(cfg: Config) -> None:
    begin = time.time()
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward gave NaN with an explicit mask
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch sees no CUDA device; use --device cpu")
    source = cfg.model or str(stories.MODEL)
    tok = Tokenizer.load(source)
    load = {"dtype": DTYPES[cfg.dtype], "device": cfg.device}
    checkpoint = last_checkpoint(Path(cfg.out)) if cfg.resume else None
    model = load_model(checkpoint or source, **load)
    control = load_model(source, **load) if cfg.control else None
    data = {split: encode(load_problems(cfg.task, split, cfg.model, cfg.data_dir, cfg.shots), tok,
                          cfg.max_prompt) for split in ("train", "test")}
    if max(cfg.eval_n, cfg.eval_during) > len(data["test"]):
        raise BadInput(f"--eval-n {cfg.eval_n} --eval-during {cfg.eval_during}: expected at most "
                       f"{len(data['test'])}, the test problems there are")
    model.checkpointing = cfg.checkpointing
    optim = MasterAdamW(model, lr=cfg.lr, max_grad_norm=cfg.max_grad_norm)
    out = open_run(cfg)
    state = {"before": None, "mismatch_max": 0.0, "bad_steps": 0, "skipped": 0}
    first = 0
    if checkpoint:
        saved = torch.load(checkpoint / "trainer.pt", map_location=cfg.device, weights_only=True)
        optim.load_state_dict(saved["optim"])
        first, state = saved["step"], {key: saved[key] for key in state}
        for name in ("metrics.jsonl", "samples.jsonl"):
            keep_lines(out / name, first)
    if cfg.model is None:
        print("model: the small one embedded in data/, on generated GSM8K-style stories; for a "
              "real one: --model FOLDER (a Qwen2.5 or Qwen3 checkpoint), on GSM8K itself")
    print(f"run: {out}   steps {first}..{cfg.steps}   {cfg.policy} keep {cfg.keep:g}   "
          f"lambda {cfg.lam:g}   lr {cfg.lr:g}   {cfg.dtype} on {cfg.device}", flush=True)

    if cfg.eval_n and state["before"] is None:
        state["before"] = evaluate(model, tok, data["test"][: cfg.eval_n], cfg)
        print("before: " + "   ".join(describe(*x) for x in state["before"].items()), flush=True)
    bar = tqdm(range(first, cfg.steps), desc="train", initial=first, total=cfg.steps)
    for step in bar:
        batch = batch_of_step(data["train"], cfg, step)
        metrics, samples = train_step(model, optim, tok, batch, cfg, step)
        if control is not None:
            metrics["reward/control_mean"] = float(sample(control, tok, batch, cfg, step)[2].mean())
        done = step + 1
        if cfg.eval_every and done % cfg.eval_every == 0 and done < cfg.steps:
            during = evaluate(model, tok, data["test"][: cfg.eval_during], cfg)
            metrics |= {f"eval/{name}": result["accuracy"] for name, result in during.items()}
            bar.write(f"step {done}: " + "   ".join(describe(*x) for x in during.items()))
        append(out / "metrics.jsonl", [{"step": done, "lr": cfg.lr, **metrics}])
        append(out / "samples.jsonl", samples)
        bar.set_postfix_str(f"reward {metrics['reward/mean']:.2f}")
        state["mismatch_max"] = max(state["mismatch_max"], metrics["mismatch/logp_abs_max"])
        state["skipped"] += metrics["step/skipped"]
        state["bad_steps"] = state["bad_steps"] + 1 if metrics["step/skipped"] else 0
        if state["bad_steps"] == MAX_BAD_STEPS:
            raise BadInput(f"{MAX_BAD_STEPS} steps in a row, up to step {done}, had a NaN or "
                           f"infinite loss or gradient; the last good checkpoint stays in {out}; "
                           "lower --lr")
        if done == cfg.steps or (cfg.save_every and done % cfg.save_every == 0):
            save_checkpoint(out, done, model, tok, optim, state)

    summary = {"steps": cfg.steps, "n_eval": cfg.eval_n, "skipped_steps": state["skipped"],
               "mismatch_logp_abs_max": state["mismatch_max"]}
    if cfg.eval_n:
        after = evaluate(model, tok, data["test"][: cfg.eval_n], cfg)
        for when, results in (("before", state["before"]), ("after", after)):
            for name, result in results.items():
                summary[f"accuracy_{when}_{name}"] = result["accuracy"]
                summary[f"interval_{when}_{name}"] = [result["low"], result["high"]]
        print("greedy accuracy on test problems, 95 % interval")
        for when, results in (("before", state["before"]), ("after ", after)):
            print(f"{when}  " + "   ".join(describe(*x) for x in results.items()))
    summary["seconds"] = time.time() - begin
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {out} in {summary['seconds']:.0f} s")


if __name__ == "__main__":
    run_cli(lambda: run(resolve(parse(sys.argv[1:]))))
