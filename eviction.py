"""Which keys to give up: policies (score functions), and the one function that acts on a score.

A policy only scores: higher stays. It never moves, merges or rewrites a key, because a mask could
not replay that. `evict` turns a score into a decision, frees the slots and records the decision:

    evict_at[.., j] = first query position that can no longer see key j   (NEVER if it stays)

Invariant: eviction is permanent, so this one integer a key says all there is to say.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import BadInput

NEVER = 2**31 - 1


@dataclass(frozen=True)
class Eviction:
    """What the rollout may keep of a prompt."""
    policy: str = "snapkv"  # a name of `POLICIES`
    keep: float = 0.5  # share of the prompt's keys that stay in each layer and KV head
    sinks: int = 4  # first positions, always kept (attention sinks, arXiv 2309.17453)
    window: int = 32  # newest positions, always kept; with `snapkv` the queries that vote
    seed: int = 0  # of the `random` policy

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise BadInput(f"--policy {self.policy}: unknown; expected one of "
                           + ", ".join(POLICIES))
        if not 0 < self.keep <= 1:
            raise BadInput(f"--keep {self.keep}: expected a share in (0, 1]; 1 evicts nothing")
        if self.sinks < 0 or self.window < 1:
            raise BadInput(f"--sinks {self.sinks} --window {self.window}: expected >= 0 and >= 1")

    def budget(self, P: int) -> int:
        """How many of a prompt's P keys stay in each layer and KV head."""
        nearest = int(self.keep * P + 0.5 + 1e-9)  # 0.7 * 45 is 31.499999999999996
        return min(P, max(nearest, self.sinks + self.window))


@dataclass(frozen=True)
class Seen:
    """What a policy may look at: one layer, right after the query at `pos.max()` has attended."""
    q: Tensor  # (B, Hq, W, D) the last W queries, rotated, in position order
    k: Tensor  # (B, Hkv, S, D) keys, rotated, in position order
    pos: Tensor  # (B, Hkv, S) int64
    layer: int
    seed: int
    sequence: int  # identity of the prompt

    def attention(self) -> Tensor:
        """Attention probabilities (B, Hkv, groups, W, S) of the last queries, in float32."""
        B, Hq, W, D = self.q.shape
        _, Hkv, S, _ = self.k.shape
        q = self.q.float().view(B, Hkv, Hq // Hkv, W, D)
        z = q @ self.k.float().unsqueeze(2).mT * D**-0.5  # (B, Hkv, groups, W, S)
        q_pos = self.pos[..., -W:]  # the last W queries belong to the last W keys
        hidden = self.pos[:, :, None, :] > q_pos[..., None]  # (B, Hkv, W, S)
        return z.masked_fill(hidden.unsqueeze(2), -torch.inf).softmax(-1)


def snapkv(seen: Seen) -> Tensor:
    """Attention of the last W queries to a key and its neighbours (SnapKV, arXiv 2404.14469).

    Differs: mean over the query heads of a group, as the cache is per KV head; maximum pooling of
    width 7 (average pooling pads with zeros and so votes against the sinks).
    """
    W = seen.q.shape[2]
    score = seen.attention().mean(dim=(2, 3))  # (B, Hkv, S)
    score[..., -W:] = 0  # the window is protected anyway and must not lift its neighbours
    return F.max_pool1d(score, kernel_size=7, stride=1, padding=3)


def recent(seen: Seen) -> Tensor:
    """The newest stay: StreamingLLM (arXiv 2309.17453). Differs: keys keep their own rotation."""
    return seen.pos.float()


def random(seen: Seen) -> Tensor:
    """One lifelong priority, a hash of (seed, sequence, layer, head, position): the control."""
    head = torch.arange(seen.pos.shape[1], device=seen.pos.device)[:, None]
    x = seen.pos
    for part in (head, seen.layer, seen.sequence, seen.seed % 2**31):  # products fit int64
        x = _mix(x + part * 0x9E3779B9 + 1)
    return (x >> 40).float()  # 24 bits: exact in float32


def _mix(x: Tensor) -> Tensor:
    """A bijective scrambling of int64 (the finaliser of splitmix64; products wrap around)."""
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 0x1FFFFFFFF)


POLICIES = {"snapkv": snapkv, "recent": recent, "random": random}
DENSE = Eviction(keep=1.0)  # a full cache


def evict(score: Tensor, pos: Tensor, evict_at: Tensor, *, t: int, budget: int, sinks: int,
          window: int) -> None:
    """Free all but `budget` keys of each row and head, and record it. In place.

    Positions below `sinks` and the newest `window` stay; ties go to the newer key and NaN loses.
    The int64 key (score, pos) has no ties and, unlike "maximum + 1", loses nothing to rounding.
    Args:
        score: (B, Hkv, S), any float dtype; higher stays.
        pos: (B, Hkv, S) int64, position held by each slot, -1 = free. Evicted slots become -1.
        evict_at: (B, Hkv, T) int32, the record; evicted positions become t + 1.
        t: position of the query that has just attended.
    """
    assert score.shape == pos.shape, (score.shape, pos.shape)
    score = score.float().masked_fill(score.isnan(), -torch.inf) + 0.0  # -0.0 + 0.0 is 0.0
    bits = score.view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # in the order of the scores
    key = key.masked_fill((pos < sinks) | (pos > t - window), NEVER)  # above +inf
    key = ((key << 32) + pos).masked_fill(pos < 0, torch.iinfo(torch.int64).min)
    kept = torch.zeros_like(pos, dtype=torch.bool)
    kept.scatter_(-1, key.topk(min(budget, pos.shape[-1])).indices, True)
    gone = ~kept & (pos >= 0)
    record = torch.where(gone, t + 1, NEVER).to(torch.int32)
    evict_at.scatter_reduce_(-1, pos.clamp(min=0), record, "amin")
    pos.masked_fill_(gone, -1)
