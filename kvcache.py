"""The KV cache of a rollout: slots allocated once, attention over the live ones, and the record.

Two segments under one softmax. The *shared* segment holds the kept keys of a prompt, stored once
and read by all G samples of the group; the *own* segment holds each row's response keys.

    shared   k, v: N tensors (L, Hkv, K_n, D)     K_n = kept keys of prompt n: the same integer,
                                                  but other keys, in each layer and head
    own      k, v: (L, B, Hkv, S, D), pos: (L, B, Hkv, S), -1 = free     B = N * G rows, S slots

While decoding, a token is written into a free slot: key and value storage never grows. Slot order
carries no meaning; a key keeps the rotation of its position.
"""

import torch
from torch import Tensor

from eviction import NEVER, POLICIES, Eviction, Seen, evict
from model import Attend, ModelConfig, causal


class KVCache:
    """Slots for N prompts of G samples with up to S response tokens each."""
    def __init__(self, cfg: ModelConfig, prompt_lens: list[int], G: int, S: int, *,
                 eviction: Eviction, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.G, self.eviction = G, eviction
        B = len(prompt_lens) * G
        self.k = torch.zeros(cfg.L, B, cfg.Hkv, S, cfg.D, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.pos = torch.full((cfg.L, B, cfg.Hkv, S), -1, dtype=torch.int64, device=device)
        self.shared_k, self.shared_v, self.evict_at = [], [], []
        for P in prompt_lens:
            shape = (cfg.L, cfg.Hkv, eviction.budget(P), cfg.D)
            self.shared_k.append(self.k.new_zeros(shape))
            self.shared_v.append(self.k.new_zeros(shape))
            # A key's index in the record is its position.
            record = torch.full((cfg.L, G, cfg.Hkv, P + S), NEVER, dtype=torch.int32, device=device)
            self.evict_at.append(record)
        self.written = 0  # tokens written to each row so far: no slot above it was ever used

    @property
    def kv_bytes(self) -> int:
        """Bytes of all key and value storage, allocated once, live or not."""
        return sum(x.nbytes for x in (self.k, self.v, *self.shared_k, *self.shared_v))

    def prefill(self, n: int, sequence: int) -> Attend:
        """Attention of prompt n (one row, from position 0). Each layer is evicted as it is done and
        only the kept keys enter the cache: the transient is one layer's prompt, not all layers'."""
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            (_, Hkv, P, D), K, e = k.shape, self.shared_k[n].shape[2], self.eviction
            pos = torch.arange(P, device=k.device).expand(1, Hkv, P).clone()
            if K < P:
                seen = Seen(q[:, :, -e.window:], k, pos, layer, e.seed, sequence)
                record = self.evict_at[n][layer, :1]  # (1, Hkv, T)
                evict(POLICIES[e.policy](seen), pos, record, t=P - 1, budget=K, sinks=e.sinks,
                      window=e.window)
                self.evict_at[n][layer] = record  # the same for all samples
            live = (pos[0] >= 0).nonzero()[:, 1].view(Hkv, K, 1).expand(-1, -1, D)
            self.shared_k[n][layer] = k[0].gather(1, live)
            self.shared_v[n][layer] = v[0].gather(1, live)
            return causal(layer, q, k, v)
        return attend

    def decode(self, pos: Tensor) -> Attend:
        """Attention of one new token a row, at positions pos (B,) int64: write, then attend."""
        self.written = min(self.written + 1, self.k.shape[3])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._write(layer, k, v, pos)
            return self._attention(layer, q)
        return attend

    def _write(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> None:
        B, Hkv, _, D = k.shape
        held = self.pos[layer, :, :, : self.written]
        slot = (held < 0).int().argmax(-1, keepdim=True)  # (B, Hkv, 1) the first free one
        assert (held.gather(-1, slot) < 0).all(), "no free slot"
        held.scatter_(-1, slot, pos.view(B, 1, 1).expand(-1, Hkv, -1))
        at = slot.unsqueeze(-1).expand(-1, -1, -1, D)
        self.k[layer].scatter_(2, at, k)
        self.v[layer].scatter_(2, at, v)

    def _attention(self, layer: int, q: Tensor) -> Tensor:
        B, Hq, _, D = q.shape
        held = self.pos[layer, :, :, : self.written]  # (B, Hkv, S)
        own_k, own_v = (x[layer, :, :, : self.written] for x in (self.k, self.v))
        Hkv, S, G = held.shape[1], held.shape[2], self.G
        K = max(x.shape[2] for x in self.shared_k)
        q = q.view(B, Hkv, Hq // Hkv, D) * D**-0.5
        # One row of scores over both segments: [prompt keys (padded to K) | own slots].
        z = q.new_full((B, Hkv, Hq // Hkv, K + S), -torch.inf)
        torch.matmul(q, own_k.mT, out=z[..., K:])
        z[..., K:].masked_fill_((held < 0).unsqueeze(2), -torch.inf)
        for n, k in enumerate(self.shared_k):
            rows = slice(n * G, (n + 1) * G)
            folded = q[rows].transpose(0, 1).reshape(Hkv, -1, D)  # all queries of a KV head
            scores = folded @ k[layer].mT  # (Hkv, G * groups, K_n)
            z[rows, ..., : k.shape[2]] = scores.unflatten(1, (G, -1)).transpose(0, 1)
        wide = z.dtype if z.dtype == torch.float64 else torch.float32
        p = z.softmax(-1, dtype=wide).to(q.dtype)
        o = p[..., K:] @ own_v
        for n, v in enumerate(self.shared_v):
            rows = slice(n * G, (n + 1) * G)
            folded = p[rows, ..., : v.shape[2]].transpose(0, 1).flatten(1, 2)
            o[rows] += (folded @ v[layer]).unflatten(1, (G, -1)).transpose(0, 1)
        return o.view(B, Hq, 1, D)
