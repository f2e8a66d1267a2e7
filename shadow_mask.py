"""The shadow mask: the learner attends to exactly what the sampler saw (track 1).

The rollout recorded `evict_at`; `visible` turns a record into visibility, and `Replay` is the
learner's `attend` that applies it to one packed group,

    row = [ prompt (P) | response 1 (R) | ... | response G (R) ]   each response at positions P..

so linear layers see P + G R tokens instead of G (P + R). Prompt rows are computed once: nothing was
evicted before them, or, where the prompt came in chunks, the same for all samples. Response rows
attend to what is left of the prompt and of their own keys. No T x T mask exists: a block of rows
loads the keys that it can see, and builds its own piece (which attention keeps for its backward
pass, unless layers are checkpointed). With a record of nothing evicted the same code is the dense
learner, and the teacher of track 2.

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
ROWS = 512  # of queries in a block: few, as each block loads only the keys that it can see


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
            the same weights whose prompt rows were dense, too. The row then holds the responses
            alone: prompt rows are the same in the masked and in the dense pass.
    """

    def __init__(self, evict_at: Tensor, P: int, *,
                 prompt_kv: dict[int, tuple[Tensor, Tensor]] | None = None):
        during_prefill = evict_at[..., :P].clamp(max=P)
        assert (during_prefill == during_prefill[:, :1]).all(), "one prefill a group"
        self.dense_prompt = bool((during_prefill == P).all())
        self.evict_at, self.P, self.given = evict_at, P, prompt_kv
        self.prompt_kv: dict[int, tuple[Tensor, Tensor]] = {}  # of this pass, detached

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        P, evict_at = self.P, self.evict_at[layer]
        if self.given is not None:
            return replay(q, *self.given[layer], k, v, evict_at)
        prompt, response = ([x[:, :, s] for x in (q, k, v)] for s in (slice(P), slice(P, None)))
        self.prompt_kv[layer] = tuple(x.detach() for x in prompt[1:])
        if self.dense_prompt:
            o_prompt = causal(layer, *prompt)
        else:  # a sample of its own, before which there is nothing
            nothing = prompt[1][:, :, :0]
            o_prompt = replay(prompt[0], nothing, nothing, *prompt[1:], evict_at[:1, :, :P])
        o = replay(response[0], *prompt[1:], *response[1:], evict_at)
        return torch.cat((o_prompt, o), dim=2)


def replay(q: Tensor, prompt_k: Tensor, prompt_v: Tensor, k: Tensor, v: Tensor,
           evict_at: Tensor) -> Tensor:
    """Attention of G samples' rows, packed one after another, under their record.

    Args:
        q: (1, Hq, G * R, D), each sample's at positions P .. P + R - 1.
        prompt_k, prompt_v: (1, Hkv, P, D), at positions 0 .. P - 1, shared by the samples.
        k, v: (1, Hkv, G * R, D), the samples' own.
        evict_at: (G, Hkv, P + R) int32, one layer's record.
    Returns: o like q.
    """
    (G, Hkv, T), P, D = evict_at.shape, prompt_k.shape[2], q.shape[3]
    R, groups = T - P, q.shape[1] // Hkv
    q = q[0].view(Hkv, groups, G, R, D).permute(2, 0, 1, 3, 4)  # (G, Hkv, groups, R, D)
    k, v = (x[0].view(Hkv, G, R, D).transpose(0, 1) for x in (k, v))  # (G, Hkv, R, D)
    size = min(R, ROWS, max(1, MASK_ELEMENTS // (Hkv * T)))  # rows at a time
    step = max(1, MASK_ELEMENTS // (Hkv * T * size))  # samples at a time
    out = []
    for some in (slice(g, g + step) for g in range(0, G, step)):
        blocks = [_block(q[some, :, :, i : i + size], prompt_k[0], prompt_v[0], k[some], v[some],
                         evict_at[some], P + i) for i in range(0, R, size)]
        out.append(torch.cat(blocks, dim=3))
    return torch.cat(out).permute(1, 2, 0, 3, 4).reshape(1, Hkv * groups, G * R, D)


def _block(q: Tensor, prompt_k: Tensor, prompt_v: Tensor, k: Tensor, v: Tensor, evict_at: Tensor,
           start: int) -> Tensor:
    """`replay` of n samples' rows q (n, Hkv, groups, r, D) from position `start` on."""
    (n, Hkv, groups, r, D), P = q.shape, prompt_k.shape[1]
    # Keys that no row of the block can see are not loaded: in each head, the seen ones first.
    seen = (evict_at[..., : start + r] > start).any(0)  # (Hkv, start + r)
    at_prompt, at_own = _seen_first(seen[:, :P]), _seen_first(seen[:, P:])  # (Hkv, K), (Hkv, Ko)
    k_pos = torch.cat((at_prompt, P + at_own), dim=1)  # (Hkv, K + Ko)
    q_pos = torch.arange(start, start + r, device=q.device)
    mask = visible(evict_at.gather(2, k_pos.expand(n, -1, -1)), q_pos, k_pos)

    def load(of_prompt: Tensor, own: Tensor) -> Tensor:
        of_prompt = of_prompt.gather(1, at_prompt.unsqueeze(-1).expand(-1, -1, D))
        own = own.gather(2, at_own.unsqueeze(-1).expand(n, -1, -1, D))
        both = torch.cat((of_prompt.expand(n, -1, -1, -1), own), dim=2)  # (n, Hkv, K + Ko, D)
        return both.flatten(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)

    # A KV head becomes a batch row, so the query heads of its group share keys and mask.
    o = F.scaled_dot_product_attention(q.flatten(0, 1), load(prompt_k, k), load(prompt_v, v),
                                       attn_mask=mask.flatten(0, 1).unsqueeze(1))
    return o.view(n, Hkv, groups, r, D)


def _seen_first(seen: Tensor) -> Tensor:
    """Indices (Hkv, K) of the True of each row of seen (Hkv, T), padded by others to the most."""
    most = int(seen.sum(-1).max()) if seen.shape[1] else 0
    return seen.int().argsort(dim=-1, descending=True, stable=True)[:, :most]
