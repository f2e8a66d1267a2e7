"""Train with Shadow Mask Distillation: `python train.py --task gsm8k`.

The loop, once a step: sample a batch of groups under the evicting cache (`rollout`), reward them
(`data/`), accumulate the gradient of the replayed pass (`grpo`), update (`optim`), log.

Invariant: what step s does is a function of the weights, the seed and s. A run that was killed and
resumed therefore equals the uninterrupted one, and evaluation changes nothing.
"""

import contextlib
import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from tqdm import tqdm

import lora
from config import Config, parse
from data.stories import MODEL
from errors import BadInput, read_json, run_cli
from eval import Encoded, describe, evaluate, load, load_problems, respond
from grpo import advantages, backward, old_policy
from model import ModelConfig, Qwen, find_checkpoint, save_model
from optim import MasterOptimizer
from plan import check_memory
from tokenizer import Tokenizer

MAX_BAD_STEPS = 10  # non-finite steps in a row that end a run
DEAD_STEPS = 50  # without a group whose rewards differ: then a warning
CHECKPOINTS = "checkpoint-" + 6 * "[0-9]"


def open_run(cfg: Config) -> Path:
    """Create, or check, the folder of the run."""
    out = Path(cfg.out)
    try:
        if cfg.resume:
            saved = read_json(out / "config.json")
            for name, value in dataclasses.asdict(cfg).items():
                if name in ("steps", "resume", "overwrite", "out") or saved.get(name) == value:
                    continue
                raise BadInput(f"--resume: {out} was run with {name} = {saved.get(name)!r}, got "
                               f"{value!r}; give the same flags (only --steps may change)")
        elif out.exists() and any(out.iterdir()):
            # A model folder has a config.json too.
            if not cfg.overwrite or '"save_every"' not in (out / "config.json").read_text():
                raise BadInput(f"--out {out}: exists already; continue a run with --resume, replace"
                               " one (with its config.json) with --overwrite, or name another")
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        commit = subprocess.getoutput(f'git -C "{Path(__file__).parent}" describe --always --dirty')
        config = {**dataclasses.asdict(cfg), "commit": commit, "torch": torch.__version__}
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as e:
        raise BadInput(f"--out {out}: cannot be written ({e}); name a folder that can") from None
    return out


def save_checkpoint(out: Path, step: int, model: Qwen, tok: Tokenizer, optim: MasterOptimizer,
                    before: dict | None, seconds: float, base: str | None) -> None:
    """Written aside and renamed, so a kill or a full disk leaves the previous one valid."""
    aside, final = out / "checkpoint.tmp", out / f"checkpoint-{step:06d}"
    base = base or str(MODEL)
    base = str(Path(base).resolve()) if Path(base).is_dir() else base
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        if lora.adapters(model):
            lora.save_adapters(model, aside, base)
        else:
            save_model(model, aside)
        tok.save(aside)
        state = {"step": step, "optim": optim.state_dict(), "before": before, "seconds": seconds}
        torch.save(state, aside / "trainer.pt")
        aside.rename(final)
    except (OSError, RuntimeError, SafetensorError) as e:
        raise BadInput(f"{aside}: cannot be written ({e}); make room and --resume") from e
    for old in set(out.glob(CHECKPOINTS)) - {final}:
        shutil.rmtree(old)


def keep_lines(path: Path, steps: int) -> list[dict]:
    """Drop the log lines of steps that will be done again after a resume; returns the others."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [x for x in lines if x.endswith("\n") and json.loads(x)["step"] <= steps]
    path.write_text("".join(kept), encoding="utf-8")
    return [json.loads(x) for x in kept]


def finite(row: dict) -> dict:
    """What JSON can say: null for a mean of nothing, a NaN loss or a reward that abstained."""
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x
            for key, x in row.items()}


def append(path: Path, rows: list[dict]) -> None:
    with path.open("a", encoding="utf-8") as f:
        f.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)


@contextlib.contextmanager
def phase(device: str):
    """`sec` and peak `bytes` of a phase (CUDA: allocated by torch; Linux: resident; else 0)."""
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


def batch_of_step(encoded: Encoded, cfg: Config, step: int) -> Encoded:
    """The prompts of a step: the data in a new order each epoch, a function of (seed, step). No
    batch holds a prompt twice: what does not fill a batch is left out of the epoch."""
    epoch, i = divmod(step, len(encoded) // cfg.prompts)
    order = np.random.default_rng([cfg.seed, epoch]).permutation(len(encoded))
    return [encoded[j] for j in order[i * cfg.prompts : (i + 1) * cfg.prompts]]


def train_step(model: Qwen, optim: MasterOptimizer, tok: Tokenizer, batch: Encoded, cfg: Config,
               step: int, teacher: Qwen | None = None) -> tuple[dict, list[dict]]:
    """The updates of one rollout; returns its metrics and its samples. See `grpo.backward`."""
    with phase(cfg.device) as rolled:
        rollout, texts, rewards = respond(model, tok, batch, cfg, step=step)
    with phase(cfg.device) as learned:
        objective = cfg.objective()
        old_logp = old_policy(model, rollout, objective, cfg.updates_per_rollout)
        metrics, learnt = {}, 0
        for _ in range(cfg.updates_per_rollout):
            now = backward(model, rollout, rewards, objective, old_logp, teacher)
            learnt += now.pop("tok/learn")
            now["grad/norm"] = optim.step(finite=math.isfinite(now["loss"]))
            # Of the first update, whose policy is the sampler's, but for what the others add.
            metrics = {**now, **metrics, "policy/clip_frac": now["policy/clip_frac"]}
            bad = not (math.isfinite(now["grad/norm"]) and math.isfinite(now["loss"]))
            metrics["step/skipped"] = int(bad)
            if bad:
                break
    tokens = int(rollout.lengths.sum())
    metrics |= {
        "reward/mean": float(rewards.nanmean()),
        "len/mean_tok": tokens / rollout.lengths.numel(),
        "len/truncated_frac": float((~rollout.stopped).float().mean()),
        "kv/bytes_peak": rollout.kv_bytes_peak, "kv/bytes_dense": rollout.kv_bytes_dense,
        "mem/rollout_bytes_peak": rolled["bytes"], "mem/learner_bytes_peak": learned["bytes"],
        "time/rollout_sec": rolled["sec"], "time/learn_sec": learned["sec"],
        "tok/rollout_per_sec": tokens / rolled["sec"],
        "tok/learn_per_sec": learnt / learned["sec"]}
    advantage = advantages(rewards, scale=cfg.loss != "dr_grpo")
    samples = [{"step": step + 1, "problem": p.index, "sample": g, "prompt": p.prompt,
                "completion": texts[n][g], "reward": float(rewards[n, g]),
                "advantage": float(advantage[n, g]), "prompt_tok": len(ids),
                "response_tok": int(rollout.lengths[n, g]), "stopped": bool(rollout.stopped[n, g])}
               for n, (p, ids) in enumerate(batch) for g in range(cfg.group)]
    return metrics, samples


def run(cfg: Config) -> None:
    begin = time.time()
    checkpoint = max(Path(cfg.out).glob(CHECKPOINTS), default=None) if cfg.resume else None
    if cfg.resume and not checkpoint:
        raise BadInput(f"--resume: {cfg.out} holds no checkpoint; start again with --overwrite")
    first = int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0
    if cfg.steps < first:
        raise BadInput(f"--steps {cfg.steps}: the run has done {first}; expected at least that")
    folder = find_checkpoint(cfg.model or str(MODEL))
    if (folder / lora.CONFIG).is_file():
        raise BadInput(f"--model {cfg.model}: adapters; train on from a whole model, such as the "
                       "`merged` that --save-merged writes, or --resume their run")
    tok = Tokenizer.load(folder)
    train, test = (load_problems(cfg, split, tok) for split in ("train", "test"))
    if cfg.prompts > len(train):
        raise BadInput(f"--prompts {cfg.prompts}: expected at most {len(train)} problems")
    if cfg.eval_every and cfg.eval_during > len(test):
        raise BadInput(f"--eval-during {cfg.eval_during}: expected at most {len(test)} problems")
    shape = ModelConfig.from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
    needs = check_memory(cfg, shape, max(len(ids) for _, ids in train))
    tok, model = load(cfg, checkpoint)
    if cfg.lora_rank and not checkpoint:
        lora.add_lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.seed)
    taught, initial = cfg.teacher == "initial", None
    if cfg.control or taught:
        initial = lora.Initial(model) if cfg.lora_rank else load(cfg)[1]
    model.checkpointing = cfg.checkpointing
    optim = MasterOptimizer(model, lr=cfg.lr, max_grad_norm=cfg.max_grad_norm, kind=cfg.optimizer)
    out, log, before, warned = open_run(cfg), [], None, False
    if checkpoint:
        saved = torch.load(checkpoint / "trainer.pt", map_location=cfg.device)
        optim.load_state_dict(saved["optim"])
        before, begin = saved["before"], begin - saved["seconds"]
        keep_lines(out / "samples.jsonl", first)
        log = keep_lines(out / "metrics.jsonl", first)
    if cfg.model is None and cfg.data_dir is None:
        print(f"the model embedded in data/ learns on generated {cfg.task} problems; for a real "
              "Qwen2.5 or Qwen3 checkpoint on real ones: --model FOLDER")
    print(f"{json.dumps(dataclasses.asdict(cfg))}\n{needs}", flush=True)
    if cfg.limit and before is None:
        before = evaluate(model, tok, test[: cfg.limit], cfg)
        print("before: " + describe(before), flush=True)

    for step in (bar := tqdm(range(first, cfg.steps), initial=first, total=cfg.steps)):
        batch, done = batch_of_step(train, cfg, step), step + 1
        metrics, samples = train_step(model, optim, tok, batch, cfg, step,
                                      initial if taught else None)
        if cfg.control:
            rewards = respond(initial, tok, batch, cfg, step=step)[2]
            metrics["reward/control_mean"] = float(rewards.nanmean())
        if cfg.eval_every and done % cfg.eval_every == 0:
            during = evaluate(model, tok, test[: cfg.eval_during], cfg)
            metrics |= {f"eval/{name}": next(iter(x.values())) for name, x in during.items()}
            bar.write(f"step {done}: {describe(during)}")
        log.append(finite({"step": done, "lr": cfg.lr, **metrics}))
        append(out / "metrics.jsonl", log[-1:])
        append(out / "samples.jsonl", [finite(x) for x in samples])
        bar.set_postfix_str(f"reward {metrics['reward/mean']:.2f}")
        if not warned and len(log) >= DEAD_STEPS and all(
                x["reward/dead_group_frac"] == 1 for x in log[-DEAD_STEPS:]):
            warned = True
            bar.write(f"warning: for {DEAD_STEPS} steps, up to {done}, no group held two different "
                      f"rewards (the last mean is {metrics['reward/mean']:.3g}), so the policy "
                      "learns nothing; look at samples.jsonl, try a larger --group or --keep")
        if sum(x["step/skipped"] for x in log[-MAX_BAD_STEPS:]) == MAX_BAD_STEPS:
            raise BadInput(f"{MAX_BAD_STEPS} steps in a row, up to {done}, had a NaN or infinite "
                           f"loss or gradient; {out} keeps the last good checkpoint; lower --lr")
        due = done == cfg.steps or (cfg.save_every and done % cfg.save_every == 0)
        if due and not metrics["step/skipped"]:  # else the weights may be what is wrong
            save_checkpoint(out, done, model, tok, optim, before, time.time() - begin, cfg.model)
    if cfg.save_merged:
        (out / "merged").mkdir(exist_ok=True)
        save_model(model, out / "merged", state=lora.merged(model))
        tok.save(out / "merged")

    summary = {"steps": cfg.steps, "n_eval": cfg.limit,
               "skipped_steps": sum(x["step/skipped"] for x in log),
               "mismatch_logp_abs_max": max(
                   (x["mismatch/logp_abs_max"] or 0.0 for x in log), default=0.0)}
    if cfg.limit:
        results = {"before": before, "after": evaluate(model, tok, test[: cfg.limit], cfg)}
        main = next(iter(before["dense"]))
        print(f"greedy {main} on {cfg.limit} test problems, 95 % interval")
        for when, result in results.items():
            print(f"{when:6}  {describe(result)}")
            for name, x in result.items():
                summary |= {f"{key}_{when}_{name}": value for key, value in x.items()}
    summary["seconds"] = time.time() - begin
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {out} in {summary['seconds']:.0f} s")


if __name__ == "__main__":
    run_cli(lambda: run(parse(sys.argv[1:], __doc__)))
