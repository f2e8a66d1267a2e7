"""AdamW on float32 master weights, with gradient clipping.

bfloat16 has 8 bits of mantissa: an update of 1e-6 on a weight of 0.01 is rounded away, and so are
small gradients added to a large sum. Masters and accumulated gradients are therefore float32 and
the network's own weights are a rounded copy. Weights that are float32 or wider are their own
masters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MasterAdamW:
    """Use: `backward()` any number of times, then `step()`."""

    def __init__(self, model: nn.Module, *, lr: float, max_grad_norm: float):
        self.max_grad_norm = max_grad_norm
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p if p.dtype.itemsize >= 4 else nn.Parameter(p.detach().float())
                        for p in self.params]
        for p, master in zip(self.params, self.masters, strict=True):
            if p is not master:
                p.register_post_accumulate_grad_hook(lambda p, m=master: _move_grad(p, m))
        self.adamw = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, finite: bool = True) -> float:
        """Clip and update, and clear the gradients.

        Returns:
            The gradient norm before clipping. If it, or `finite`, is not fine (a NaN or infinite
            loss), no weight and no moment changes.
        """
        norm = float(nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm))
        if finite and norm < float("inf"):
            self.adamw.step()
            with torch.no_grad():
                for p, master in zip(self.params, self.masters, strict=True):
                    if p is not master:
                        p.copy_(master)
        self.adamw.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict:
        distinct = [m.detach() for p, m in zip(self.params, self.masters, strict=True)
                    if p is not m]
        return {"adamw": self.adamw.state_dict(), "masters": distinct}

    def load_state_dict(self, state: dict) -> None:
        self.adamw.load_state_dict(state["adamw"])
        distinct = [m for p, m in zip(self.params, self.masters, strict=True) if p is not m]
        with torch.no_grad():
            for master, saved in zip(distinct, state["masters"], strict=True):
                master.copy_(saved)


def _move_grad(p: Tensor, master: Tensor) -> None:
    """Add a low-precision gradient to the float32 sum and free it at once."""
    if master.grad is None:
        master.grad = p.grad.float()
    else:
        master.grad += p.grad
    p.grad = None
