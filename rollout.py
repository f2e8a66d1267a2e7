"""The sampler: prefill each prompt once, decode its G samples together, record what was seen.

Randomness is a function of (seed, step, prompt, sample, token): one uniform number a token, from a
generator of its own for each sample, inverted through the cumulative distribution. So neither the
batch nor what ran before changes a sample, and a resumed run draws what it would have drawn.

Invariant: the tokens sampled are the tokens trained on, with the log-probs they were sampled at.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from errors import BadInput
from eviction import Eviction
from kvcache import KVCache
from model import Qwen


@dataclass(frozen=True)
class Rollout:
    """N prompts with G samples each, of up to R response tokens. Masks come from `lengths`, never
    from token values: padding may equal a stop token."""
    sequence: list[int]  # N, identity of each prompt
    prompts: list[Tensor]  # N tensors (P_n,) int64
    tokens: Tensor  # (N, G, R) int64
    lengths: Tensor  # (N, G) int64, response tokens with the stop token, if it came
    stopped: Tensor  # (N, G) bool, False = truncated at R
    logp: Tensor  # (N, G, R) float32 or wider, natural log at the sampling temperature
    evict_at: list[Tensor]  # N tensors (L, G, Hkv, P_n + R) int32
    kv_bytes_peak: int  # largest key and value storage of prefill and decoding
    kv_bytes_dense: int  # the same with nothing evicted, still one prompt copy a group

    @property
    def mask(self) -> Tensor:
        """(N, G, R) bool, True = a sampled token."""
        t = torch.arange(self.tokens.shape[2], device=self.lengths.device)
        return t < self.lengths[..., None]


def uniforms(seed: int, step: int, sequence: int, sample: int, R: int) -> np.ndarray:
    """R numbers in [0, 1), float64: the randomness of one sample, whatever else is sampled."""
    return np.random.default_rng([seed, step, sequence, sample]).random(R)


def choose(logits: Tensor, temperature: float, u: Tensor) -> tuple[Tensor, Tensor]:
    """Pick a token a row: int64 (B,), and its log-prob (B,) in the dtype of the logits (B, V).
    Args:
        temperature: 0 = greedy, whose log-prob is reported at temperature 1.
        u: (B,) float64 in [0, 1), on the CPU where the device has no float64.
    """
    logp = (logits / (temperature or 1.0)).log_softmax(-1)
    if logp.isnan().any():
        raise BadInput("the model's log-probs are NaN; lower --lr or raise --temperature")
    if temperature == 0:
        token = logits.argmax(-1)
    else:
        cdf = logp.to(u.device, torch.float64).exp().cumsum(-1)
        # Scaled by the last entry, which rounding leaves beside 1, so u < 1 always finds a token
        # of positive probability.
        token = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0].to(logp.device)
    return token, logp.gather(-1, token[:, None])[:, 0]


@torch.no_grad()
def generate(model: Qwen, prompts: Sequence[Sequence[int]], *, sequence: Sequence[int], G: int,
             max_new: int, stop_ids: frozenset[int], eviction: Eviction, temperature: float = 1.0,
             seed: int = 0, step: int = 0) -> Rollout:
    """Sample G responses to each prompt under an evicting cache.

    Args:
        prompts: N token sequences, none empty. No padding: each is prefilled by itself.
        sequence: N identities (the prompt's index in its data set); they key the randomness.
        max_new: R, response tokens at most.
        stop_ids: a sample ends with the first of these, which belongs to it.
    """
    assert len(prompts) == len(sequence) and all(len(p) > 0 for p in prompts)
    device, dtype = model.embed_tokens.weight.device, model.embed_tokens.weight.dtype
    ids = [torch.tensor(p, dtype=torch.int64, device=device) for p in prompts]
    lens, N, R, B = [len(p) for p in prompts], len(ids), max_new, len(ids) * G
    cache = KVCache(model.cfg, lens, G, R, eviction=eviction, sequence=sequence, dtype=dtype,
                    device=device)
    hidden, kv_bytes_peak = [], 0
    for n, prompt in enumerate(ids):
        pos = torch.arange(len(prompt), device=device)
        for chunk in cache.chunks(n):
            h = model(prompt[None, chunk], pos[None, chunk], cache.prefill(n, chunk))
            kv_bytes_peak = max(kv_bytes_peak, cache.kv_bytes)
        hidden.append(h[:, -1])
    logits = model.logits(torch.cat(hidden)).repeat_interleave(G, dim=0)  # (B, V)

    u = torch.tensor(np.stack([uniforms(seed, step, s, g, R) for s in sequence for g in range(G)]),
                     device="cpu" if device.type == "mps" else device)
    pos = torch.tensor(lens, device=device).repeat_interleave(G)  # of the token about to be sampled
    stops = torch.tensor(sorted(stop_ids), device=device)
    tokens = torch.zeros(B, R, dtype=torch.int64, device=device)
    logp = torch.zeros(B, R, dtype=logits.dtype, device=device)
    lengths = torch.zeros(B, dtype=torch.int64, device=device)
    stopped = torch.zeros(B, dtype=torch.bool, device=device)
    for t in range(R):
        running = ~stopped
        token, token_logp = choose(logits, temperature, u[:, t])
        tokens[:, t], logp[:, t] = token * running, token_logp * running
        lengths += running
        stopped |= torch.isin(token, stops)
        running = ~stopped.cpu()
        if t + 1 == R or not running.any():
            break
        attend = cache.decode(pos, running)
        logits = model.logits(model(tokens[:, t : t + 1], pos[:, None], attend)[:, 0])
        kv_bytes_peak = max(kv_bytes_peak, cache.kv_bytes)
        pos = pos + 1

    key_bytes = 2 * model.cfg.L * model.cfg.Hkv * model.cfg.D * dtype.itemsize
    return Rollout(
        sequence=list(sequence), prompts=ids, tokens=tokens.view(N, G, R),
        lengths=lengths.view(N, G), stopped=stopped.view(N, G), logp=logp.view(N, G, R),
        evict_at=cache.evict_at, kv_bytes_peak=kv_bytes_peak,
        kv_bytes_dense=key_bytes * (sum(lens) + B * R))
