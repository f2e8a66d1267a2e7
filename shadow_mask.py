"""The shadow mask: the learner attends to exactly what the sampler saw (track 1).

The rollout recorded `evict_at`; `visible` turns a record into visibility, and `Replay` is the
learner's `attend` that applies it to one packed group,

    row = [ prompt (P) | response 1 (R) | ... | response G (R) ]   each response at positions P..

so linear layers see P + G R tokens instead of G (P + R). Prompt rows are dense: they were computed
before anything was evicted. Response rows attend to the prompt's surviving keys and to their own.
With a record of nothing evicted the same code is the dense learner, and the teacher of track 2.

Invariant: nothing is decided here. The record is an argument, so neither changed weights nor a
recomputation under gradient checkpointing can change the mask.
Source: arXiv 2605.06850, tracks 1 and 2. Differs: one integer a key instead of a T x T mask.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from eviction import NEVER
from model import causal

MASK_ELEMENTS = 2**25  # the largest mask built at once


def visible(evict_at: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Which keys each query may attend to.
    Args:
        evict_at: (..., Tk) int32, first query position that no longer sees the key.
        q_pos: (Tq,) int64, absolute positions of the queries.
        k_pos: (..., Tk) int64, absolute positions of the keys.
    Returns:
        (..., Tq, Tk) bool, True = attends. A query always sees its own key.
    """
    q_pos = q_pos[:, None]
    return (k_pos.unsqueeze(-2) <= q_pos) & (q_pos < evict_at.unsqueeze(-2))


def dense_record(evict_at: Tensor) -> Tensor:
    """A record like this one of a rollout that kept everything."""
    return torch.full_like(evict_at, NEVER)


def pack(prompt: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lay a group out as one row: prompt (P,) and sampled tokens (G, R), int64.
    Returns:
        ids and pos, both (1, P + G * R) int64; and (G, R) int64, the row that predicts each token:
        the last prompt row for the first token, the token before for the others.
    """
    (P,), (G, R) = prompt.shape, tokens.shape
    t = torch.arange(R, device=prompt.device)
    ids = torch.cat((prompt, tokens.flatten()))[None]
    pos = torch.cat((torch.arange(P, device=prompt.device), (P + t).repeat(G)))[None]
    row = P - 1 + t + R * torch.arange(G, device=prompt.device)[:, None]
    row[:, 0] = P - 1
    return ids, pos, row


class Replay:
    """The learner's `attend` for one packed group.
    Args:
        evict_at: (L, G, Hkv, P + R) int32, the record.
        P: prompt tokens.
        prompt_kv: the prompt's keys and values of each layer, (1, Hkv, P, D), from a `Replay` of
            the same weights. The row then holds the responses alone: prompt rows are the same in
            the masked and in the dense pass.
    """
    def __init__(self, evict_at: Tensor, P: int, *,
                 prompt_kv: dict[int, tuple[Tensor, Tensor]] | None = None):
        assert (evict_at[..., :P] >= P).all(), "prompt rows must be dense"
        self.evict_at, self.P, self.given = evict_at, P, prompt_kv
        self.prompt_kv: dict[int, tuple[Tensor, Tensor]] = {}  # of this pass, detached

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        P = self.P
        if self.given is not None:
            return self._responses(layer, q, *self.given[layer], k, v)
        prompt_k, k = k[:, :, :P], k[:, :, P:]
        prompt_v, v = v[:, :, :P], v[:, :, P:]
        self.prompt_kv[layer] = (prompt_k.detach(), prompt_v.detach())
        o_prompt = causal(layer, q[:, :, :P], prompt_k, prompt_v)
        o = self._responses(layer, q[:, :, P:], prompt_k, prompt_v, k, v)
        return torch.cat((o_prompt, o), dim=2)

    def _responses(self, layer: int, q: Tensor, prompt_k: Tensor, prompt_v: Tensor, k: Tensor,
                   v: Tensor) -> Tensor:
        """Response rows q (1, Hq, G * R, D) over prompt keys and their own; o like q."""
        evict_at, P = self.evict_at[layer], self.P
        G, Hkv, T = evict_at.shape
        R, D, groups = T - P, q.shape[3], q.shape[1] // Hkv
        # Keys that no response row can see are not loaded: in each head, the seen ones first.
        seen = (evict_at[:, :, :P] > P).any(0)  # (Hkv, P)
        K = int(seen.sum(-1).max())
        index = seen.int().argsort(dim=-1, descending=True, stable=True)[:, :K]  # (Hkv, K)
        at = index.unsqueeze(-1).expand(-1, -1, D)
        prompt_k, prompt_v = prompt_k[0].gather(1, at), prompt_v[0].gather(1, at)  # (Hkv, K, D)
        own_pos = torch.arange(P, T, device=q.device)
        k_pos = torch.cat((index, own_pos.expand(Hkv, R)), dim=1)  # (Hkv, K + R)
        until = evict_at.gather(2, k_pos.expand(G, -1, -1))
        q = q[0].view(Hkv, groups, G, R, D).permute(2, 0, 1, 3, 4)  # (G, Hkv, groups, R, D)
        k, v = (x[0].view(Hkv, G, R, D).transpose(0, 1) for x in (k, v))  # (G, Hkv, R, D)
        step = max(1, MASK_ELEMENTS // (Hkv * R * (K + R)))  # samples at a time
        out = []
        for s in (slice(g, min(g + step, G)) for g in range(0, G, step)):
            mask = visible(until[s], own_pos, k_pos)  # (n, Hkv, R, K + R)
            # A KV head becomes a batch row, so the query heads of its group share keys and mask.
            keys, values = (
                torch.cat((of_prompt.expand(len(mask), -1, -1, -1), own[s]), dim=2)
                .flatten(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
                for of_prompt, own in ((prompt_k, k), (prompt_v, v)))
            out.append(F.scaled_dot_product_attention(
                q[s].flatten(0, 1), keys, values, attn_mask=mask.flatten(0, 1).unsqueeze(1)))
        o = torch.cat(out).view(G, Hkv, groups, R, D)
        return o.permute(1, 2, 0, 3, 4).reshape(1, Hkv * groups, G * R, D)
