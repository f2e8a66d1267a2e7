"""Which keys to give up: policies (score functions), schedules, and the one function that acts.

A policy only scores: higher stays. It never moves, merges or rewrites a key, because a mask could
not replay that. `evict` turns a score into a decision, frees the slots and records the decision:

    evict_at[.., j] = first query position that can no longer see key j   (NEVER if it stays)

Invariant: eviction is permanent, so this one integer a key says all there is to say.
To add a policy, write one function from `Seen` to scores and enter it in `POLICIES`, as
Policy(function), with `queries` or `mass` if it reads attention.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import BadInput

NEVER = 2**31 - 1
ELEMENTS = 2**25  # the largest matrix of scores or similarities built at once
DECODE_WINDOW = 8  # while decoding, at most so many queries vote and so many newest keys stay


@dataclass(frozen=True)
class Seen:
    """What a policy may look at: the keys of one layer, right after the query at `t` attended.

    Read only: these are views of the cache. The B rows are one prompt, or its samples. Slots come
    in any order, another in each head; a free one has pos = -1 and its score is ignored.
    """

    q: Tensor  # (B, Hq, W, D) the last W queries, rotated, at positions t - W + 1 .. t
    k: Tensor  # (B, Hkv, S, D) keys, rotated
    pos: Tensor  # (B, Hkv, S) int64
    mass: Tensor | None  # (B, Hkv, S) attention received so far, if the policy asks for it
    t: int
    layer: int
    seed: int
    sequence: int  # identity of the prompt

    def attention(self) -> Tensor:
        """Attention probabilities (B, Hkv, groups, W, S) of the last queries over the keys that
        are live now, in float32 or wider."""
        B, Hq, W, D = self.q.shape
        Hkv = self.k.shape[1]
        assert W, "no queries are kept for this policy: enter it as Policy(..., queries=W)"
        q = widen(self.q).view(B, Hkv, Hq // Hkv, W, D)
        z = q @ widen(self.k).unsqueeze(2).mT * D**-0.5  # (B, Hkv, groups, W, S)
        q_pos = self.t - W + 1 + torch.arange(W, device=self.pos.device)
        pos = self.pos[:, :, None, None]
        return z.masked_fill((pos < 0) | (pos > q_pos[:, None]), -torch.inf).softmax(-1)


def widen(x: Tensor) -> Tensor:
    """Scores are float32 or wider: 4,096 scores in bfloat16 have about a hundred values."""
    return x if x.dtype == torch.float64 else x.float()


def snapkv(seen: Seen) -> Tensor:
    """Attention of the last W queries to a key and its neighbours (SnapKV, arXiv 2404.14469).

    Differs: mean over the query heads of a group, as the cache is per KV head; maximum pooling of
    width 7 (average pooling pads with zeros and so votes against the sinks), over the keys that
    are live, in the order of their positions.
    """
    W = seen.q.shape[2]
    score = seen.attention().mean(dim=(2, 3))  # (B, Hkv, S)
    # The window is protected anyway and must not lift its neighbours.
    score = score.masked_fill(seen.pos > seen.t - W, 0)
    order = seen.pos.argsort(-1)  # free slots first: their score is 0
    pooled = F.max_pool1d(score.gather(-1, order), kernel_size=7, stride=1, padding=3)
    return torch.empty_like(pooled).scatter_(-1, order, pooled)


def h2o(seen: Seen) -> Tensor:
    """Attention received from all queries so far: heavy hitters (H2O, arXiv 2306.14048).

    Differs: mean over the query heads of a group; a key evicted is gone, and its slot's mass with
    it; half of the budget is for the newest, as in the paper, unless --recent says otherwise.
    """
    return seen.mass


def recent(seen: Seen) -> Tensor:
    """The newest, after the sinks: StreamingLLM (arXiv 2309.17453).

    Differs: keys keep the rotation of their own position.
    """
    return seen.pos.float()


def random(seen: Seen) -> Tensor:
    """A lifelong priority, hash(seed, sequence, layer, head, position): the control.

    Drawing anew at each eviction would not be uniform: old keys must survive every draw.
    """
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


def tova(seen: Seen) -> Tensor:
    """Attention of the last query, one set for all heads of a layer (TOVA, arXiv 2401.06104)."""
    assert (seen.pos == seen.pos[:, :1]).all(), "all heads must hold the same positions"
    score = seen.attention()[:, :, :, -1].mean(dim=(1, 2))  # (B, S)
    return score.unsqueeze(1).expand(seen.pos.shape)


def rkv(seen: Seen) -> Tensor:
    """Attended to, but unlike the other keys (R-KV, arXiv 2505.24133, lambda 0.1, W = 8).

    0.1 * snapkv - 0.9 * softmax(mean cosine to the other keys). Of the near-duplicates (cosine
    above 0.5) of each key the newest is exempt, so that one of them survives.
    Differs: rows are independent (the public code uses the first for all); a key without a
    near-duplicate exempts none.
    """
    live = seen.pos >= 0
    unit = F.normalize(widen(seen.k), dim=-1).masked_fill(~live.unsqueeze(-1), 0)
    B, Hkv, S, _ = unit.shape
    total = torch.zeros_like(unit[..., 0])  # (B, Hkv, S)
    for i in torch.arange(S, device=unit.device).split(max(1, ELEMENTS // (B * Hkv * S))):
        cosine = unit[:, :, i] @ unit.mT  # (B, Hkv, i, S)
        cosine[..., torch.arange(len(i)), i] = 0
        pos = seen.pos.unsqueeze(2).masked_fill(cosine <= 0.5, -1)
        newest = pos.amax(-1, keepdim=True)
        total += cosine.masked_fill((pos == newest) & (pos >= 0), 0).sum(2)
    mean = total / live.sum(-1, keepdim=True)
    redundancy = mean.masked_fill(~live, -torch.inf).softmax(-1)
    return 0.1 * snapkv(seen) - 0.9 * redundancy


def knorm(seen: Seen) -> Tensor:
    """Keys of small norm (arXiv 2406.11430)."""
    return -widen(seen.k).norm(dim=-1)


def keydiff(seen: Seen) -> Tensor:
    """Keys unlike the mean direction of all keys (KeyDiff, arXiv 2504.15364)."""
    unit = F.normalize(widen(seen.k), dim=-1).masked_fill((seen.pos < 0).unsqueeze(-1), 0)
    return -F.cosine_similarity(unit, unit.mean(dim=2, keepdim=True), dim=-1)


class Policy(NamedTuple):
    """A score function, and what the cache must remember for it."""

    score: Callable[[Seen], Tensor]  # (B, Hkv, S), any float dtype, higher stays
    queries: int = 0  # of the last queries, so many are shown, at most --window
    mass: bool = False  # sum up the attention that each key receives
    recent: float | None = None  # share of the budget for the newest, if --recent is not given


POLICIES = {
    "snapkv": Policy(snapkv, queries=2**31),
    "h2o": Policy(h2o, mass=True, recent=0.5),
    "recent": Policy(recent),
    "random": Policy(random),
    "tova": Policy(tova, queries=1),
    "rkv": Policy(rkv, queries=8),
    "knorm": Policy(knorm),
    "keydiff": Policy(keydiff),
}
LAYER_BUDGETS = ("uniform", "pyramid")


@dataclass(frozen=True)
class Eviction:
    """Policy and schedule: how many keys stay, when, and which always do."""

    policy: str = "snapkv"  # a name of `POLICIES`
    keep: float | None = None  # share of a prompt's keys left by prefill; 0.5, or 1 with a budget
    _: KW_ONLY
    budget: int | None = None  # B: a row is cut to B keys whenever its live keys reach B + N
    evict_every: int = 128  # N
    prefill_chunk: int | None = None  # K: prefill K tokens at a time, evicting after each
    layer_budget: str = "uniform"
    sinks: int = 4  # first positions, always kept (attention sinks, arXiv 2309.17453)
    recent: int | None = None  # newest positions, always kept; None = window, or policy's share
    window: int = 32  # last queries that vote, for policies that ask them; their keys are kept
    seed: int = 0  # of the `random` policy

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise BadInput(f"--policy {self.policy}: unknown; expected one of "
                           + ", ".join(POLICIES))
        if self.keep is None:
            object.__setattr__(self, "keep", 0.5 if self.budget is None else 1.0)
        if not 0 < self.keep <= 1:
            raise BadInput(f"--keep {self.keep}: expected a share in (0, 1]; 1 evicts nothing")
        if self.layer_budget not in LAYER_BUDGETS:
            raise BadInput(f"--layer-budget {self.layer_budget}: expected one of "
                           + ", ".join(LAYER_BUDGETS))
        for name, least in (("budget", 1), ("evict_every", 1), ("prefill_chunk", 1), ("sinks", 0),
                            ("recent", 1), ("window", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadInput(f"--{name.replace('_', '-')} {value}: expected at least {least}")
        if self.budget is not None and self.budget < self.floor:
            raise BadInput(f"--budget {self.budget}: smaller than --sinks {self.sinks} plus the "
                           f"{self.floor - self.sinks} newest of --recent or --window; raise "
                           "--budget or lower those")

    def votes(self, *, decoding: bool) -> int:
        """W, how many of the last queries the policy is shown."""
        most = min(self.window, DECODE_WINDOW) if decoding else self.window
        return min(POLICIES[self.policy].queries, most)

    def newest(self, budget: int | None = None, *, decoding: bool) -> int:
        """How many of the newest keys always stay; without a budget, the least for any."""
        share = POLICIES[self.policy].recent
        if self.recent is not None:
            count = self.recent
        elif share is not None:
            count = 1 if budget is None else min(int(share * budget), budget - self.sinks)
        else:
            count = min(self.window, DECODE_WINDOW) if decoding else self.window
        return max(1, count, self.votes(decoding=decoding))

    @property
    def floor(self) -> int:
        """No budget is smaller: sinks, newest keys and voting queries have their place."""
        return self.sinks + self.newest(decoding=False)

    def stays(self, P: int, layer: int = 0, L: int = 1) -> int:
        """How many of a prompt's P keys are left in each head of a layer when prefill ends."""
        nearest = int(self.keep * P + 0.5 + 1e-9)  # 0.7 * 45 is 31.499999999999996
        kept = self._of_layer(min(P, max(nearest, self.floor)), P, layer, L)
        if self.budget is None:
            return kept
        # In one piece, a prompt is like any row: cut when it reaches B + N. In chunks, above B.
        B = self.row_budget(layer, L)
        slack = self.evict_every if self.prefill_chunk is None else 1
        return B if kept >= B + slack else kept

    def row_budget(self, layer: int = 0, L: int = 1) -> int:
        """B of a layer: what decoding cuts a row back to."""
        return self._of_layer(self.budget, 2 * self.budget, layer, L)

    def _of_layer(self, mean: int, most: int, layer: int, L: int) -> int:
        """`pyramid` falls linearly, at most from 3/2 to 1/2 of the mean (after PyramidKV, arXiv
        2406.02069). The sum over layers stays L * mean; no layer gets more than `most`."""
        if self.layer_budget == "uniform" or L == 1:
            return mean
        tip = min(mean // 2, most - mean, max(mean - self.floor, 0))
        return mean + int(tip * (L - 1 - 2 * layer) / (L - 1))


DENSE = Eviction(keep=1.0)  # a full cache


def evict(score: Tensor, pos: Tensor, evict_at: Tensor, *, t: int, budget: int, sinks: int,
          recent: int, rows: Tensor | None = None) -> None:
    """Free all but `budget` keys of each row and head, and record it. In place.

    Positions below `sinks` and the newest `recent` stay; ties go to the newer key and NaN loses.
    The int64 key (score, pos) has no ties and, unlike "maximum + 1", loses nothing to rounding.

    Args:
        score: (B, Hkv, S), any float dtype; higher stays.
        pos: (B, Hkv, S) int64, position held by each slot, -1 = free. Evicted slots become -1.
        evict_at: (B, Hkv, T) int32, the record; evicted positions become t + 1.
        t: position of the query that has just attended.
        rows: (B,) bool, the rows to evict from; None = all.
    Raises:
        BadInput: the score has another shape than `pos`.
    """
    if not torch.is_tensor(score) or score.shape != pos.shape:
        got = tuple(score.shape) if torch.is_tensor(score) else type(score).__name__
        raise BadInput(f"the eviction policy returned {got}; expected a score for each row, KV "
                       f"head and slot, shape {tuple(pos.shape)}; correct the policy")
    score = score.float().masked_fill(score.isnan(), -torch.inf) + 0.0  # -0.0 + 0.0 is 0.0
    bits = score.view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # in the order of the scores
    key = key.masked_fill((pos < sinks) | (pos > t - recent), NEVER)  # above +inf
    key = ((key << 32) + pos).masked_fill(pos < 0, torch.iinfo(torch.int64).min)
    kept = torch.zeros_like(pos, dtype=torch.bool)
    kept.scatter_(-1, key.topk(min(budget, pos.shape[-1])).indices, True)
    gone = ~kept & (pos >= 0)
    if rows is not None:
        gone &= rows[:, None, None]
    record = torch.where(gone, t + 1, NEVER).to(torch.int32)
    evict_at.scatter_reduce_(-1, pos.clamp(min=0), record, "amin")
    pos.masked_fill_(gone, -1)
