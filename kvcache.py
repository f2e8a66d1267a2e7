"""The KV cache of a rollout: slots, attention over the live ones, and the record of evictions.

A token is written into a free slot; eviction marks slots free (pos = -1) and the next tokens
overwrite them. While decoding no key is moved and no storage grows. Slot order carries no meaning;
a key keeps the rotation of its position.

Attention runs over two segments under one softmax: the kept keys of a *prompt*, stored once and
read by all G samples of the group, and each row's *own* slots. Where samples evict prompt keys on
their own while decoding (a budget), these go into the rows' own slots and the first is empty.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eviction import ELEMENTS, NEVER, POLICIES, Eviction, Seen, evict
from model import Attend, ModelConfig, causal


class Slots:
    """One layer's keys and values: S slots for each of B rows and KV heads."""

    def __init__(self, cfg: ModelConfig, B: int, S: int, *, votes: int, mass: bool,
                 dtype: torch.dtype, device: torch.device | str):
        self.k = torch.zeros(B, cfg.Hkv, S, cfg.D, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.pos = torch.full((B, cfg.Hkv, S), -1, dtype=torch.int64, device=device)
        self.used = 0  # no slot from here on was ever written
        # What policies look at: the last queries, and the attention that each key has received.
        self.q = torch.zeros(B, cfg.Hq, votes, cfg.D, dtype=dtype, device=device)
        wide = dtype if dtype == torch.float64 else torch.float32
        self.mass = self.k.new_zeros(self.pos.shape, dtype=wide) if mass else None

    @property
    def kv_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def write(self, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Put k, v (B, Hkv, T, D) into free slots; pos (B, T) int64, -1 leaves the slot free."""
        B, Hkv, T, D = k.shape
        self.used = min(self.used + T, self.k.shape[2])
        held = self.pos[:, :, : self.used]
        count = (held < 0).cumsum(-1)  # the i-th free slot is where the count reaches i
        i = torch.arange(1, T + 1, device=pos.device).expand(B, Hkv, T).contiguous()
        slot = torch.searchsorted(count, i)  # (B, Hkv, T)
        assert (slot < self.used).all(), "no free slot"
        held.scatter_(-1, slot, pos[:, None].expand(-1, Hkv, -1))
        at = slot.unsqueeze(-1).expand(-1, -1, -1, D)
        self.k.scatter_(2, at, k)
        self.v.scatter_(2, at, v)
        if self.mass is not None:
            self.mass.scatter_(-1, slot, 0)  # what the slot held before is forgotten

    def attend(self, q: Tensor, pos: Tensor, prompts: Sequence["Slots"] = ()) -> Tensor:
        """Attention of q (B, Hq, T, D) at pos (B, T) over the live keys at or before each; o like
        q. `prompts` (T = 1 then): N rows whose keys are read by B / N rows each."""
        step = max(1, ELEMENTS // (q.shape[0] * q.shape[1] * self.used))
        parts = [self._attend(*x, prompts) for x in zip(q.split(step, 2), pos.split(step, 1),
                                                        strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _attend(self, q: Tensor, pos: Tensor, prompts: Sequence["Slots"]) -> Tensor:
        B, Hq, T, D = q.shape
        own_k, own_v = (x[:, :, : self.used] for x in (self.k, self.v))
        held = self.pos[:, :, : self.used].unsqueeze(2)  # (B, Hkv, 1, S)
        Hkv, S, groups = own_k.shape[1], own_k.shape[2], Hq // own_k.shape[1]
        K, G = max((x.k.shape[2] for x in prompts), default=0), B // max(1, len(prompts))
        q = q.reshape(B, Hkv, groups * T, D) * D**-0.5
        # One row of scores over both segments, written in place: [prompt keys (K) | own slots].
        z = q.new_full((B, Hkv, groups * T, K + S), -torch.inf)
        torch.matmul(q, own_k.mT, out=z[..., K:])
        hidden = (held < 0) | (held > pos[:, None, :, None])  # (B, Hkv, T, S)
        z[..., K:].unflatten(2, (groups, T)).masked_fill_(hidden.unsqueeze(2), -torch.inf)
        for n, prompt in enumerate(prompts):
            rows = slice(n * G, (n + 1) * G)
            folded = q[rows].transpose(0, 1).flatten(1, 2)  # all queries of a KV head
            scores = folded @ prompt.k[0].mT  # (Hkv, G * groups, K_n)
            z[rows, ..., : scores.shape[-1]] = scores.unflatten(1, (G, -1)).transpose(0, 1)
        wide = z.dtype if z.dtype == torch.float64 else torch.float32
        p = z.softmax(-1, dtype=wide)
        if self.mass is not None:
            self.mass[:, :, : self.used] += p[..., K:].unflatten(2, (groups, T)).mean(2).sum(2)
        p = p.to(q.dtype)
        o = p[..., K:] @ own_v
        for n, prompt in enumerate(prompts):
            rows = slice(n * G, (n + 1) * G)
            folded = p[rows, ..., : prompt.v.shape[2]].transpose(0, 1).flatten(1, 2)
            o[rows] += (folded @ prompt.v[0]).unflatten(1, (G, -1)).transpose(0, 1)
        return o.view(B, Hq, T, D)

    def observe(self, q: Tensor) -> None:
        """Remember the last queries of q (B, Hq, T, D), newest last."""
        if self.q.shape[2]:
            self.q = torch.cat((self.q, q), dim=2)[:, :, q.shape[2] :]

    def copy_live(self, rows: slice, source: "Slots") -> None:
        """Fill empty rows with the live keys of a one-row `source`, as many in each head."""
        Hkv, D = source.k.shape[1], source.k.shape[3]
        live = (source.pos[0] >= 0).nonzero()[:, 1].view(Hkv, -1)  # (Hkv, K)
        K = live.shape[1]
        at = live.unsqueeze(-1).expand(-1, -1, D)
        self.k[rows, :, :K] = source.k[0].gather(1, at)
        self.v[rows, :, :K] = source.v[0].gather(1, at)
        self.pos[rows, :, :K] = source.pos[0].gather(1, live)
        if self.mass is not None:
            self.mass[rows, :, :K] = source.mass[0].gather(1, live)
        self.q[rows] = source.q[:, :, source.q.shape[2] - self.q.shape[2] :]
        self.used = max(self.used, K)


class KVCache:
    """Keys of N prompts with G samples of up to R response tokens each, and the record.

    Attributes:
        evict_at: N tensors (L, G, Hkv, P_n + R) int32. A key's index in it is its position.
    """

    def __init__(self, cfg: ModelConfig, prompt_lens: Sequence[int], G: int, R: int, *,
                 eviction: Eviction, sequence: Sequence[int], dtype: torch.dtype,
                 device: torch.device | str = "cpu"):
        self.cfg, self.prompt_lens, self.G, self.R = cfg, prompt_lens, G, R
        self.eviction, self.policy, self.sequence = eviction, POLICIES[eviction.policy], sequence
        self.dtype, self.device = dtype, device
        self.stays = [[eviction.stays(P, layer, cfg.L) for layer in range(cfg.L)]
                      for P in prompt_lens]
        self.prompts: list[list[Slots]] = [[] for _ in prompt_lens]  # N x L, one row each
        self.own: list[Slots] = []  # L, of B = N * G rows; made when decoding starts
        self.evict_at = [torch.full((cfg.L, G, cfg.Hkv, P + R), NEVER, dtype=torch.int32,
                                    device=device) for P in prompt_lens]
        self.steps = 0  # decoded so far

    @property
    def kv_bytes(self) -> int:
        """Bytes of all key and value storage, live or not. Within a forward pass of prefill, and
        when decoding starts, one layer's keys are for a moment held in addition."""
        return sum(slots.kv_bytes for layers in (*self.prompts, self.own) for slots in layers)

    def _slots(self, B: int, S: int, *, decoding: bool) -> Slots:
        evicts = not decoding or self.eviction.budget is not None
        return Slots(self.cfg, B, S, mass=self.policy.mass and evicts,
                     votes=self.eviction.votes(decoding=decoding) if evicts else 0,
                     dtype=self.dtype, device=self.device)

    # ---- prefill: one prompt at a time, one row, from position 0 -------------------------------

    def chunks(self, n: int) -> list[slice]:
        """The pieces in which prompt n is prefilled: one, unless it is too long for its budget."""
        P, K = self.prompt_lens[n], self.eviction.prefill_chunk
        if K is None or P <= min(self.stays[n]):
            K = P
        return [slice(i, min(i + K, P)) for i in range(0, P, K)]

    def prefill(self, n: int, chunk: slice) -> Attend:
        """Attention of one piece of prompt n, evicted after it, layer by layer. After the last
        piece only the kept keys are held; a prompt in one piece holds no more than one layer's."""
        P, start, stop = self.prompt_lens[n], chunk.start, chunk.stop
        pos = torch.arange(start, stop, device=self.device)[None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            held, stays = self.prompts[n], self.stays[n][layer]
            if start == 0:
                held.append(self._slots(1, min(P, stays + stop), decoding=False))
            slots = held[layer]
            slots.write(k, v, pos)
            plain = start == 0 and not self.policy.mass  # no earlier keys
            o = causal(layer, q, k, v) if plain else slots.attend(q, pos)
            slots.observe(q)
            if stop > stays:
                self._evict(slots, n, layer, slice(0, 1), t=stop - 1, budget=stays, decoding=False)
            if stop == P:
                held[layer] = self._slots(1, min(P, stays), decoding=True)
                held[layer].copy_live(slice(0, 1), slots)
                self.evict_at[n][layer] = self.evict_at[n][layer, :1].clone()  # for all samples
            return o
        return attend

    # ---- decoding: one token a row -------------------------------------------------------------

    def _start(self) -> None:
        """Make the rows' own slots: empty, or, with a budget, holding the prompt's keys as well."""
        L, e, G, N = self.cfg.L, self.eviction, self.G, len(self.prompts)
        if e.budget is None:
            self.own = [self._slots(N * G, self.R, decoding=True) for _ in range(L)]
            return
        self.budgets = [e.row_budget(layer, L) for layer in range(L)]
        self.limit = torch.tensor(self.budgets)[:, None] + e.evict_every  # (L, 1)
        kept = [[slots.k.shape[2] for slots in prompt] for prompt in self.prompts]
        self.live = torch.tensor(kept).T.repeat_interleave(G, dim=1)  # (L, B) keys in each head
        for layer in range(L):
            most = max(kept[n][layer] for n in range(N)) + self.R
            own = self._slots(N * G, min(int(self.limit[layer]), most), decoding=True)
            for n, prompt in enumerate(self.prompts):
                own.copy_live(slice(n * G, (n + 1) * G), prompt[layer])
                prompt[layer] = None  # released layer by layer
            self.own.append(own)
        self.prompts = []

    def decode(self, pos: Tensor, running: Tensor) -> Attend:
        """Attention of one new token a row: write, attend, evict.

        Args:
            pos: (B,) int64, its position.
            running: (B,) bool on the CPU. A finished row writes, evicts and records nothing.
        """
        if not self.own:
            self._start()
        G, due = self.G, torch.zeros(self.cfg.L, len(running), dtype=torch.bool)
        if self.eviction.budget is not None:
            self.live += running
            due = (self.live >= self.limit) & running
        held = pos.masked_fill(~running.to(pos.device), -1)[:, None]
        step, self.steps = self.steps, self.steps + 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            slots = self.own[layer]
            slots.write(k, v, held)
            o = slots.attend(q, pos[:, None], [prompt[layer] for prompt in self.prompts])
            slots.observe(q)
            for n in due[layer].view(-1, G).any(-1).nonzero()[:, 0].tolist():
                rows = slice(n * G, (n + 1) * G)
                self._evict(slots, n, layer, rows, t=self.prompt_lens[n] + step, decoding=True,
                            budget=self.budgets[layer], due=due[layer, rows].to(pos.device))
            if due[layer].any():
                self.live[layer][due[layer]] = self.budgets[layer]
            return o
        return attend

    def _evict(self, slots: Slots, n: int, layer: int, rows: slice, *, t: int, budget: int,
               decoding: bool, due: Tensor | None = None) -> None:
        """Ask the policy about some rows of prompt n, and act on the answer."""
        e, used = self.eviction, slots.used
        seen = Seen(slots.q[rows], slots.k[rows, :, :used], slots.pos[rows, :, :used],
                    None if slots.mass is None else slots.mass[rows, :, :used],
                    t, layer, e.seed, self.sequence[n])
        record = self.evict_at[n][layer, : seen.pos.shape[0]]
        evict(self.policy.score(seen), seen.pos, record, t=t, budget=budget, sinks=e.sinks,
              recent=e.newest(budget, decoding=decoding), rows=due)
