"""Every flag of the programs, as one frozen dataclass. `None` depends on the model: `DEFAULTS`."""

import argparse
import dataclasses
import math
import typing
from dataclasses import dataclass, field
from datetime import datetime

import torch

from data import TASKS
from errors import BadInput
from eviction import LAYER_BUDGETS, POLICIES, Eviction
from grpo import LOSSES, METHODS, TEACHERS, Objective
from model import DTYPES
from optim import OPTIMIZERS


def flag(default, help: str, choices: typing.Sequence[str] | None = None, *,
         unset: str | None = None):
    """A flag; `unset` says in the help what a default of None means."""
    return field(default=default, metadata={"help": help, "choices": choices, "unset": unset})


@dataclass(frozen=True)
class Config:
    task: str = flag("gsm8k", "what to learn", list(TASKS))
    method: str = flag("smd", "how the learner deals with eviction", list(METHODS))
    model: str | None = flag(None, "Qwen checkpoint: a folder, or ORG/NAME on the hub",
                             unset="the embedded model")
    data_dir: str | None = flag(None, "folder of {train,test}.jsonl, or `stories`",
                                unset="stories for the embedded model, else a download")
    shots: int = flag(0, "solved examples before each question of a real data set")
    thinking: bool = flag(False, "let a hybrid Qwen3 think before it answers")
    out: str | None = flag(None, "folder of the run", unset="a new out/<task>-<time>")
    resume: bool = flag(False, "continue the run in --out")
    overwrite: bool = flag(False, "delete the run in --out first")
    seed: int = flag(0, "of prompts, samples and the random policy")
    steps: int | None = flag(None, "rollouts, each with --updates-per-rollout optimiser steps")
    prompts: int = flag(8, "prompts a step")
    group: int = flag(8, "samples a prompt")
    max_prompt: int | None = flag(None, "longest prompt, tokens; a longer document is cut to it",
                                  unset="9000 for govreport, 2048 for hotpotqa, else 1024")
    max_new: int | None = flag(None, "longest response, tokens")
    temperature: float = flag(1.0, "of sampling, replayed by the learner")
    policy: str = flag("snapkv", "eviction policy, see below", list(POLICIES))
    keep: float | None = flag(None, "share of a prompt's keys kept when prefill ends, in (0, 1]; "
                              "sinks and newest are the least",
                              unset="0.5, or 1 with --budget")
    budget: int | None = flag(None, "B: a sequence is cut back to B keys in every layer and head, "
                              "whenever it holds B + N", unset="no limit")
    evict_every: int | None = flag(None, "N of --budget", unset="128")
    prefill_chunk: int | None = flag(None, "K: prefill a prompt that must lose keys K tokens at a "
                                     "time, and evict after each", unset="in one piece")
    layer_budget: str = flag("uniform", "the same share or budget in every layer, or linearly "
                             "falling with depth, at most from 3/2 to 1/2 of it",
                             list(LAYER_BUDGETS))
    sinks: int = flag(4, "first positions that are never evicted")
    recent: int | None = flag(None, "newest positions never evicted, beside those of the queries "
                              "that vote",
                              unset="--window, at most 8 while decoding; h2o: half of the budget")
    window: int = flag(32, "last queries that vote (snapkv; rkv: at most 8), whose keys stay; "
                       "while decoding at most 8")
    updates_per_rollout: int = flag(1, "optimiser steps on the same samples")
    lam: float | None = flag(None, "weight of the distillation KL, smd only", unset="0.1")
    teacher: str | None = flag(None, "whose dense pass is distilled, smd only: the untrained "
                               "model's, or the policy's own as in the paper", list(TEACHERS),
                               unset=TEACHERS[0])
    loss: str = flag("dapo", "token weighting", list(LOSSES))
    eps_low: float = flag(0.2, "lower clip of the ratio; idle with one update a rollout")
    eps_high: float = flag(0.2, "upper clip of the ratio; idle with one update a rollout")
    optimizer: str = flag("adamw", "adamw, or plain sgd, which needs a larger --lr and no memory",
                          list(OPTIMIZERS))
    lr: float | None = flag(None, "learning rate, constant; ten times that with LoRA")
    lora_rank: int | None = flag(None, "train adapters of this rank on all linear layers of the "
                                 "blocks, not the weights", unset="no LoRA")
    lora_alpha: float | None = flag(None, "adapters are scaled by alpha / rank",
                                    unset="twice the rank")
    save_merged: bool = flag(False, "LoRA: write a plain checkpoint, too, at the end: OUT/merged")
    max_grad_norm: float = flag(1.0, "gradient norm to clip to")
    micro_samples: int = flag(0, "samples of a group in one backward pass; 0 = all")
    checkpointing: bool | None = flag(None, "recompute blocks in the backward pass")
    control: bool | None = flag(None, "also reward the untrained model on each step's prompts")
    dtype: str | None = flag(None, "of weights and products", list(DTYPES))
    device: str = flag("auto", "auto (cuda if there is one, else cpu), cpu, cuda or mps",
                       ["auto", "cpu", "cuda", "mps"])
    limit: int = flag(256, "test problems, before and after training; 0 = no evaluation")
    eval_every: int = flag(20, "steps between evaluations during training; 0 = none")
    eval_during: int = flag(64, "test problems of an evaluation during training")
    save_every: int = flag(20, "steps between checkpoints; 0 = only the last")

    def __post_init__(self) -> None:
        least = {"group": 2, "prompts": 1, "max_prompt": 1, "max_new": 1, "eval_during": 1,
                 "updates_per_rollout": 1, "lora_rank": 1}
        checked_there = {f.name for f in dataclasses.fields(Eviction)} - {"seed"}
        for f in dataclasses.fields(self):
            if f.name in checked_there:
                continue
            name, value = f"--{f.name.replace('_', '-')}", getattr(self, f.name)
            if value == "" and f.name in ("data_dir", "model", "out"):
                raise BadInput(f"{name}: got an empty name; expected one, or leave it out")
            low = least.get(f.name, 0)
            if isinstance(value, (int, float)) and not low <= value < math.inf:
                why = "; a group of 1 has no advantage" if f.name == "group" else ""
                raise BadInput(f"{name} {value}: expected a number of at least {low}{why}")
            if f.name in ("temperature", "max_grad_norm") and value == 0:
                raise BadInput(f"{name} {value}: expected a positive number")
        if self.lora_rank is None and (self.lora_alpha is not None or self.save_merged):
            raise BadInput("--lora-alpha, --save-merged: expected --lora-rank R with them")
        if self.resume and (self.out is None or self.overwrite):
            raise BadInput("--resume: expected --out with the folder of a run, and no --overwrite")
        if self.evict_every is not None and self.budget is None:
            raise BadInput(f"--evict-every {self.evict_every}: expected --budget B with it")
        for name in ("lam", "teacher"):
            if getattr(self, name) is not None and self.method != "smd":
                raise BadInput(f"--{name} {getattr(self, name)}: --method {self.method} distils "
                               "nothing; leave it out, or use --method smd")
        there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
        if self.device in there and not there[self.device]():
            raise BadInput(f"--device {self.device}: torch sees no such device; use --device cpu")
        self.eviction()  # checks its own flags

    def eviction(self) -> Eviction:
        return Eviction(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Eviction)
                           if getattr(self, f.name) is not None})

    def objective(self) -> Objective:
        return Objective(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Objective)
                            if getattr(self, f.name) is not None})


# What a flag that was not given becomes: (embedded model, real model).
DEFAULTS = {"steps": (60, 200), "max_new": (64, 300), "lr": (1e-4, 1e-6), "control": (True, False),
            "checkpointing": (False, True), "dtype": ("fp32", "bf16")}
LORA_LR = (1e-3, 1e-5)


def resolve(cfg: Config) -> Config:
    given = {name: values[cfg.model is not None] for name, values in DEFAULTS.items()
             if getattr(cfg, name) is None}
    if cfg.lora_rank:
        given["lora_alpha"] = cfg.lora_alpha or 2 * cfg.lora_rank
        given |= {"lr": LORA_LR[cfg.model is not None]} if cfg.lr is None else {}
    if cfg.method == "smd":
        given["lam"] = Objective.lam if cfg.lam is None else cfg.lam
        given["teacher"] = (cfg.teacher or TEACHERS[0]) if given["lam"] else None
    if cfg.max_prompt is None:
        given["max_prompt"] = {"govreport": 9000, "hotpotqa": 2048}.get(cfg.task, 1024)
    given["keep"] = cfg.eviction().keep
    if cfg.budget is not None and cfg.evict_every is None:
        given["evict_every"] = Eviction.evict_every
    if cfg.device == "auto":
        given["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.out is None:
        given["out"] = f"out/{cfg.task}-{datetime.now():%Y%m%d-%H%M%S-%f}"  # new for each run
    return dataclasses.replace(cfg, **given)


def parse(argv: list[str], doc: str, only: typing.Sequence[str] = (), cls: type[Config] = Config):
    """The resolved config of a command line; `only` = the fields that this program has, `cls` adds
    some."""
    def refuse(message: str):
        raise BadInput(f"{message}; see --help")
    policies = [f"  {name:8} {(policy.score.__doc__ or '').partition(chr(10))[0]}"
                for name, policy in POLICIES.items()]
    parser = argparse.ArgumentParser(
        description=doc.split("\n", 1)[0], epilog="\n".join(["policies:", *policies]),
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = refuse
    types = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if only and f.name not in only:
            continue
        kind = [t for t in typing.get_args(types[f.name]) or [types[f.name]] if t is not type(None)]
        default = f.metadata["unset"] or f.default
        if f.name in DEFAULTS and f.default is None:
            default = "{} embedded, {} real model".format(*DEFAULTS[f.name])
        text = f"{f.metadata['help']} (default: {default})"
        how = ({"action": argparse.BooleanOptionalAction} if kind == [bool] else
               {"type": kind[0], "choices": f.metadata["choices"], "required": f.name == "task"})
        parser.add_argument("--" + f.name.replace("_", "-"), default=f.default, help=text, **how)
    return resolve(cls(**vars(parser.parse_args(argv))))
