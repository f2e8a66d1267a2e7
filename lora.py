"""Low-rank adapters on all linear layers of the blocks: training for small cards.

`y = W x + alpha / r * B A x`: W stays as it is, A starts random, B at zero, both float32. With the
adapters off the model is the initial one, so teacher and control need no second copy of it.
Source: LoRA, arXiv 2106.09685, section 4.1; files as PEFT writes and reads them.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from errors import BadInput, read_json
from model import Qwen

CONFIG = "adapter_config.json"
PREFIX = "base_model.model.model."


class LoRALinear(nn.Module):
    """A linear layer, its `weight` and `bias` frozen, with an adapter."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.weight, self.bias, self.scale, self.on = linear.weight, linear.bias, alpha / rank, True
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        new = {"dtype": wide, "device": self.weight.device}
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, **new))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank, **new))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if not self.on:
            return y
        low = F.linear(F.linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B)
        return y + (self.scale * low).to(y.dtype)


def adapters(model: Qwen) -> dict[str, LoRALinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def add_lora(model: Qwen, rank: int, alpha: float, seed: int) -> None:
    """Freeze the model and give its blocks adapters; what it computes does not change."""
    model.requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    for block in model.layers:
        for part in (block.self_attn, block.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    adapted = LoRALinear(linear, rank, alpha)
                    with torch.no_grad():  # uniform within 1 / sqrt(in), as PEFT's
                        start = torch.rand(adapted.lora_A.shape, generator=draw) * 2 - 1
                        adapted.lora_A.copy_(start / linear.in_features**0.5)
                    setattr(part, name, adapted)


class Initial:
    """A model with its adapters off, wherever a model is asked for."""

    def __init__(self, model: Qwen):
        self.model = model

    def __call__(self, *args) -> Tensor:
        try:
            self._switch(False)
            return self.model(*args)
        finally:
            self._switch(True)

    def _switch(self, on: bool) -> None:
        for m in adapters(self.model).values():
            m.on = on

    def __getattr__(self, name: str):
        return getattr(self.model, name)


def merged(model: Qwen) -> dict[str, Tensor]:
    """The state of a plain model that computes the same: `W + alpha / r * B A`, in W's dtype."""
    state = {name: x for name, x in model.state_dict().items() if ".lora_" not in name}
    for name, m in adapters(model).items():
        low = m.scale * (m.lora_B @ m.lora_A).detach()
        state[f"{name}.weight"] = (m.weight.to(low.dtype) + low).to(m.weight.dtype)
    return state


def save_adapters(model: Qwen, folder: Path, base: str) -> None:
    """Write a PEFT adapter folder; `base` is the folder or hub name of the model it belongs to."""
    found = adapters(model)
    first = next(iter(found.values()))
    rank = first.lora_A.shape[0]
    tensors = {f"{PREFIX}{name}.lora_{x}.weight": getattr(m, f"lora_{x}").detach().cpu()
               for name, m in found.items() for x in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
              "r": rank, "lora_alpha": first.scale * rank, "lora_dropout": 0.0, "bias": "none",
              "target_modules": sorted({name.rpartition(".")[2] for name in found}),
              "inference_mode": True}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapters(model: Qwen, folder: Path) -> None:
    """Add to the base model the adapters that `save_adapters` wrote. BadInput: other ones."""
    config, path = read_json(folder / CONFIG), folder / "adapter_model.safetensors"
    try:
        add_lora(model, config["r"], config["lora_alpha"], 0)
        saved = load_file(path)
        for name, m in adapters(model).items():
            for x in "AB":
                getattr(m, f"lora_{x}").data.copy_(saved.pop(f"{PREFIX}{name}.lora_{x}.weight"))
        if saved:
            raise ValueError(f"no place for {next(iter(saved))}")
    except (LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as e:
        raise BadInput(f"{path}: {type(e).__name__}: {e}; expected the LoRA adapters of all linear "
                       "layers of this model, as train.py writes them") from e
