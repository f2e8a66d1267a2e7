"""What the contract is tested with: random models, and two ways to score a sampled token.

The oracle is plain attention over whole sequences with a T x T mask filled in key by key; it knows
nothing of kvcache.py and shadow_mask.py. The learner is the one under test.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from eviction import NEVER
from kvcache import Slots
from model import ModelConfig, Qwen
from rollout import Rollout
from shadow_mask import Replay, pack

EMBEDDED = Path(__file__).resolve().parents[1] / "data" / "embedded"
CONTROL = 1e-2  # what a wrong mask must exceed
V = 40


def build(kind: str, groups: int = 2, *, dtype: torch.dtype = torch.float64, seed: int = 0,
          vocabulary: int = V) -> Qwen:
    """A random model whose attention is far from uniform and whose output depends on it."""
    hf = {"model_type": kind, "vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": 3,
          "num_attention_heads": 2 * groups, "num_key_value_heads": 2, "head_dim": 8,
          "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 100.0,
          "tie_word_embeddings": kind == "qwen3"}
    model = Qwen(ModelConfig.from_hf(hf)).to(torch.float64)
    draw = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=draw, dtype=torch.float64)
        if p.ndim == 2:
            scale = 0.5 if "embed" in name else 1 / p.shape[1] ** 0.5
            if kind == "qwen2" and ("q_proj" in name or "k_proj" in name):
                scale *= 1.6
            p.data = noise * scale
        elif "bias" in name:
            p.data = noise * 0.3
        else:  # norms; the gains of q and k sharpen attention
            p.data = (1.5 if "q_norm" in name or "k_norm" in name else 1.0) + 0.2 * noise
    return model.to(dtype)


def make_prompts(lengths: tuple[int, ...], vocabulary: int = V) -> list[list[int]]:
    draw = np.random.default_rng(1)
    return [draw.integers(0, vocabulary, P).tolist() for P in lengths]


def embedded_prompts(count: int) -> list[list[int]]:
    """Prompts of the embedded model's own task."""
    from data.stories import problem
    from tokenizer import Tokenizer

    tokenizer = Tokenizer.load(EMBEDDED)
    return [tokenizer.chat(problem("test", i).prompt) for i in range(count)]


# ---- the oracle ---------------------------------------------------------------------------------


def full_mask(evict_at: torch.Tensor) -> torch.Tensor:
    """(G, Hkv, T, T), True = row q attends to column j, from one layer's record (G, Hkv, T)."""
    n, heads, T = evict_at.shape
    seen = np.zeros((n, heads, T, T), dtype=bool)
    for g in range(n):
        for h in range(heads):
            for j, end in enumerate(evict_at[g, h].tolist()):
                seen[g, h, j:end, j] = True
    return torch.from_numpy(seen)


def oracle_rows(model: Qwen, prompt: torch.Tensor, tokens: torch.Tensor, evict_at: torch.Tensor, *,
                temperature: float = 1.0, attention: list[torch.Tensor] | None = None):
    """(n, R, V) log-probs over the vocabulary, one row for each of n samples' tokens (n, R), under
    the record (L, n, Hkv, T). `attention` gets each layer's probabilities (n, Hkv, T, T), the mean
    over the query heads of each KV head."""
    (n, R), P = tokens.shape, len(prompt)

    def attend(layer, q, k, v):
        _, Hq, T, D = q.shape
        groups, mask = Hq // k.shape[1], full_mask(evict_at[layer])
        heads, received = [], torch.zeros(mask.shape, dtype=q.dtype)
        for h in range(Hq):
            kv = h // groups
            z = (q[:, h] @ k[:, kv].transpose(1, 2)) / D**0.5
            p = z.masked_fill(~mask[:, kv], -torch.inf).softmax(-1)
            heads.append(p @ v[:, kv])
            received[:, kv] += p.detach() / groups
        if attention is not None:
            attention.append(received)
        return torch.stack(heads, dim=1)

    ids = torch.cat((prompt.repeat(n, 1), tokens), dim=1)
    hidden = model(ids, torch.arange(P + R).repeat(n, 1), attend)
    return (model.logits(hidden)[:, P - 1 : -1] / temperature).log_softmax(-1)


def oracle(model: Qwen, prompt: torch.Tensor, tokens: torch.Tensor, evict_at: torch.Tensor, *,
           temperature: float = 1.0) -> torch.Tensor:
    """(n, R) log-probs of n samples' tokens (n, R) under the record (L, n, Hkv, T)."""
    rows = oracle_rows(model, prompt, tokens, evict_at, temperature=temperature)
    return rows.gather(-1, tokens[..., None])[..., 0]


# ---- the learner --------------------------------------------------------------------------------


def score(model: Qwen, hidden: torch.Tensor, tokens: torch.Tensor, temperature: float):
    logp = (model.logits(hidden) / temperature).log_softmax(-1)
    return logp.gather(-1, tokens[..., None])[..., 0]


def learner(model: Qwen, prompt: torch.Tensor, tokens: torch.Tensor, evict_at: torch.Tensor, *,
            temperature: float = 1.0) -> torch.Tensor:
    """(n, R) log-probs of one packed group."""
    ids, pos, row = pack(prompt, tokens)
    hidden = model(ids, pos, Replay(evict_at, len(prompt)))[0]
    return score(model, hidden[row], tokens, temperature)


def worst(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    difference = (a - b).abs()
    assert torch.isfinite(difference).all()
    return (difference if mask is None else difference[mask]).max().item()


def differs(model: Qwen, roll: Rollout, n: int, score, record: torch.Tensor,
            temperature: float = 1.0) -> float:
    """Largest difference of group n's log-probs between the sampler and the oracle or learner."""
    logp = score(model, roll.prompts[n], roll.tokens[n], record, temperature=temperature)
    return worst(logp, roll.logp[n], roll.mask[n])


def permute(slots: Slots, order: torch.Tensor) -> None:
    """Put slot order[.., i] in the place of slot i, i < used; order (B, Hkv, used)."""
    assert not torch.equal(order, order.sort(-1).values)
    for x in (slots.pos, slots.mass, slots.k, slots.v):
        if x is not None:
            x = x[:, :, : order.shape[2]]
            at = order if x.ndim == 3 else order.unsqueeze(-1).expand_as(x)
            x.copy_(x.gather(2, at))


# ---- wrong records, for controls ----------------------------------------------------------------


def later(evict_at: torch.Tensor, by: int) -> torch.Tensor:
    return torch.where(evict_at == NEVER, evict_at, evict_at + by)


def hidden_from_prompt(evict_at: torch.Tensor, P: int) -> torch.Tensor:
    """Prompt rows do not see what was evicted at the end of prefill, but for the key's own row."""
    own = torch.arange(evict_at.shape[-1], dtype=torch.int32) + 1
    return torch.where(evict_at == P, own, evict_at)


def gradients(model: Qwen, roll: Rollout, logp, record=lambda x: x) -> dict[str, torch.Tensor]:
    """Of a randomly weighted sum of the log-probs that `logp` (the oracle, or the learner) gives
    to the sampled tokens under the record."""
    weights = torch.randn(roll.logp.shape, generator=torch.Generator().manual_seed(2),
                          dtype=torch.float64) * roll.mask
    model.zero_grad()
    for n, prompt in enumerate(roll.prompts):
        value = logp(model, prompt, roll.tokens[n], record(roll.evict_at[n]))
        (weights[n] * value).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of two gradients, as a share of b's largest in the same parameter."""
    return max(worst(a[name], b[name]) / b[name].abs().max().item() for name in b)
