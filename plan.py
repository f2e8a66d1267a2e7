"""What a step needs of the device's memory, before any weight is loaded.

Bytes of weights, optimiser, key-value cache, activations and logits, for prompts of P tokens and
responses as long as the flags allow. The larger of the rollout's and the learner's sum counts.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from config import Config
from errors import BadInput
from eviction import DENSE, Eviction
from grpo import LOGIT_BYTES
from model import DTYPES, ModelConfig

RUNTIME = {"cpu": 400 << 20, "cuda": 700 << 20}  # Python and torch; a CUDA context


@dataclass(frozen=True)
class Plan:
    """Bytes. `always` is held in both phases; `kv_dense` is the cache with nothing evicted."""

    always: dict[str, int]
    rollout: dict[str, int]
    learner: dict[str, int]
    kv_dense: int

    def peak(self, phase: str) -> int:
        """Of "rollout" or "learner"."""
        return sum(self.always.values()) + sum(getattr(self, phase).values())


def parameters(s: ModelConfig) -> tuple[int, int]:
    """How many parameters a model has, and adapters of rank 1 on its blocks."""
    linear = [(s.C, s.Hq * s.D), (s.C, s.Hkv * s.D), (s.C, s.Hkv * s.D), (s.Hq * s.D, s.C),
              (s.C, s.ffn), (s.C, s.ffn), (s.ffn, s.C)]
    other = 2 * s.C + 2 * s.D * s.qk_norm + (s.Hq + 2 * s.Hkv) * s.D * s.qkv_bias
    blocks = s.L * (sum(a * b for a, b in linear) + other)
    return blocks + s.V * s.C * (2 - s.tied) + s.C, s.L * sum(a + b for a, b in linear)


def kv_bytes(cfg: Config, s: ModelConfig, P: int, eviction: Eviction) -> int:
    """Key and value storage while decoding, as `Rollout.kv_bytes_peak`."""
    key, rows = 2 * s.Hkv * s.D * DTYPES[cfg.dtype].itemsize, cfg.prompts * cfg.group
    if eviction.budget is None:
        kept = [eviction.stays(P, layer, s.L) for layer in range(s.L)]
        return key * sum(cfg.prompts * k + rows * cfg.max_new for k in kept)
    most = [eviction.row_budget(layer, s.L) + eviction.evict_every for layer in range(s.L)]
    return key * rows * sum(min(P + cfg.max_new, m) for m in most)


def memory_plan(cfg: Config, s: ModelConfig, P: int) -> Plan:
    """For a resolved config, prompts of P tokens, and all samples `max_new` tokens long."""
    b, (n, adapter) = DTYPES[cfg.dtype].itemsize, parameters(s)
    trained = adapter * cfg.lora_rank if cfg.lora_rank else n
    rows, G = cfg.prompts * cfg.group, cfg.micro_samples or cfg.group
    second = not cfg.lora_rank and (cfg.teacher == "initial" or cfg.control)
    always = {"Python, torch": RUNTIME.get(cfg.device, 0), "weights": n * b,
              "initial model": n * b * second, "adapters": 4 * trained * bool(cfg.lora_rank),
              "masters": 4 * trained * (b < 4 and not cfg.lora_rank),
              "AdamW": 8 * trained * (cfg.optimizer == "adamw")}
    evicting = DENSE if cfg.method == "dense" else cfg.eviction()
    rollout = {"KV cache": kv_bytes(cfg, s, P, evicting),
               "prefill": P * (4 * s.C + 2 * (s.Hq + s.Hkv) * s.D + 3 * s.ffn) * b,
               "sampling": rows * s.V * (2 * 4 + 2 * 8)}
    T = P + G * cfg.max_new  # one packed group
    block = T * ((6 * s.C + 5 * (s.Hq + s.Hkv) * s.D + 5 * s.ffn) * b + 12 * s.C)
    learner = {"gradients": 4 * trained + s.V * s.C * b * (b < 4 and not cfg.lora_rank),
               "activations": s.L * T * s.C * b + block if cfg.checkpointing else s.L * block,
               "logits": 5 * min(LOGIT_BYTES, 4 * G * cfg.max_new * s.V)}
    return Plan(always, rollout, learner, kv_bytes(cfg, s, P, DENSE))


def device_bytes(device: str) -> int:
    """Memory of the device; a very large number where it cannot be known."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return 1 << 62
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    stated = limit.read_text().strip() if limit.is_file() else "max"
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(whole, int(stated)) if stated.isdigit() else whole


WAYS = ({"checkpointing": True}, {"micro_samples": 1}, {"teacher": "self"}, {"lora_rank": 16},
        {"dtype": "bf16"}, {"prompts": 1})


def flags_that_fit(cfg: Config, s: ModelConfig, P: int, room: int) -> str | None:
    """The fewest of some memory-saving flags, in this order of preference, that need at most
    `room` bytes; None if all of them do not help."""
    def needs(ways: Iterable[dict]) -> int:
        asked = dataclasses.replace(cfg, **{k: v for way in ways for k, v in way.items()})
        plan = memory_plan(asked, s, P)
        return max(plan.peak("rollout"), plan.peak("learner"))

    usable = [way for way in WAYS for key in way
              if getattr(cfg, key) is not None or key == "lora_rank"]
    for count in range(1, len(usable) + 1):
        for ways in itertools.combinations(usable, count):
            if needs(ways) <= room:
                return " ".join(f"--{k.replace('_', '-')}" + ("" if v is True else f" {v}")
                                for way in ways for k, v in way.items())
    return None


def describe(plan: Plan) -> str:
    """Two lines: what each part takes, in GB, and the sums."""
    def gb(parts: dict[str, int]) -> str:
        return ", ".join(f"{name} {x / 1e9:.2f}" for name, x in parts.items() if x)
    return (f"memory in GB: {gb(plan.always)}; rollout: {gb(plan.rollout)} (KV cache without "
            f"eviction {plan.kv_dense / 1e9:.2f}); learner: {gb(plan.learner)}\n"
            f"so a rollout needs about {plan.peak('rollout') / 1e9:.2f} GB, a learner step "
            f"{plan.peak('learner') / 1e9:.2f} GB")


def check_memory(cfg: Config, s: ModelConfig, P: int, room: int | None = None) -> str:
    """`describe`, if it fits into the device, else BadInput with flags that would."""
    plan, room = memory_plan(cfg, s, P), room or device_bytes(cfg.device)
    need = max(plan.peak("rollout"), plan.peak("learner"))
    if need > room:
        ways = flags_that_fit(cfg, s, P, room)
        todo = f"this would fit: {ways}" if ways else "take a smaller model or a larger device"
        raise BadInput(f"prompts of {P} tokens: needs about {need / 1e9:.1f} GB, {cfg.device} has "
                       f"{room / 1e9:.1f} GB; {todo}")
    return f"{describe(plan)}, of {room / 1e9:.1f} GB"
