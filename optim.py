"""AdamW, or SGD, on float32 master weights, with gradient clipping.

bfloat16 rounds away an update of 1e-6 on a weight of 0.01, or a small gradient in a large sum. So
masters and gradient sums are float32; the network's weights are a rounded copy, or the masters.
"""

import torch
from torch import Tensor, nn

OPTIMIZERS = ("adamw", "sgd")


class MasterOptimizer:
    """Use: `backward()` any number of times, then `step()`. `sgd` has no momentum and no state."""

    def __init__(self, model: nn.Module, *, lr: float, max_grad_norm: float, kind: str = "adamw"):
        self.max_grad_norm, self.masters, self.rounded = max_grad_norm, [], []
        for p in (p for p in model.parameters() if p.requires_grad):
            if p.dtype.itemsize < 4:
                master = nn.Parameter(p.detach().float())
                p.register_post_accumulate_grad_hook(lambda p, m=master: _move_grad(p, m))
                self.rounded.append((p, master))
                p = master
            self.masters.append(p)
        self.optimizer = (torch.optim.SGD(self.masters, lr=lr) if kind == "sgd" else
                          torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0))

    @torch.no_grad()
    def step(self, finite: bool = True) -> float:
        """Clip, update, clear the gradients; returns the gradient norm before clipping. If that, or
        by the caller's word the loss, is not finite, no weight and no moment changes."""
        norm = float(nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm))
        if finite and norm < float("inf"):
            self.optimizer.step()
            for p, master in self.rounded:
                p.copy_(master)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(),
                "masters": [m.detach() for _, m in self.rounded]}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for (_, master), saved in zip(self.rounded, state["masters"], strict=True):
            master.copy_(saved)


def _move_grad(p: Tensor, master: Tensor) -> None:
    master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
    p.grad = None
