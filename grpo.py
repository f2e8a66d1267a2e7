"""The objective: GRPO on the shadow-masked policy, plus a KL penalty towards the dense one.

    maximise  E[ L_GRPO(pi(y|x,M)) - lam * KL( sg[pi(y|x)] || pi(y|x,M) ) ]

Track 1 is the masked pass; the teacher of track 2 is a dense pass of the same weights. Both terms
are sums over tokens with weights fixed for the whole optimiser step, so gradients do not depend on
how it is split. With one update a rollout the ratio is 1 and the policy loss near 0.
Sources: SMD arXiv 2605.06850; GRPO arXiv 2402.03300, section 4.1; DAPO arXiv 2503.14476 (token
mean); Dr. GRPO arXiv 2503.20783 (constant denominator, no division by the deviation).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eviction import NEVER
from model import Qwen
from rollout import Rollout
from shadow_mask import Replay, dense_record, pack

LOSSES = ("grpo", "dapo", "dr_grpo")
LOGIT_BYTES = 2**27  # of one chunk of float32 logits


@dataclass(frozen=True)
class Objective:
    """Constants of the loss."""
    loss: str = "dapo"  # how tokens are weighted, see `token_weights`
    lam: float = 0.1  # weight of the distillation KL; 0 is track 1 alone
    eps_low: float = 0.2  # the ratio is clipped to [1 - eps_low, 1 + eps_high]
    eps_high: float = 0.2
    temperature: float = 1.0  # that of the rollout, replayed here
    micro_samples: int = 0  # samples of a group in one packed row, 0 = all; bounds memory only


def advantages(rewards: Tensor, *, scale: bool) -> Tensor:
    """Rewards (N, G) minus their group's mean, exactly 0 if all are equal; `scale` divides by the
    group's unbiased standard deviation + 1e-6."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if scale:
        centred = centred / (rewards.std(dim=1, keepdim=True) + 1e-6)
    return centred.masked_fill(dead_groups(rewards)[:, None], 0.0)


def dead_groups(rewards: Tensor) -> Tensor:
    """(N,) bool: groups of equal rewards, which teach the policy nothing."""
    return (rewards == rewards[:, :1]).all(dim=1)


def token_weights(mask: Tensor, loss: str) -> Tensor:
    """How much each token counts, (N, G, R) float32; the loss is the weighted sum over tokens.
    Args:
        mask: (N, G, R) bool, the active tokens of the whole optimiser step.
        loss: "grpo": mean over the tokens of a sequence, then over sequences; "dapo": mean over
            all tokens; "dr_grpo": sum over tokens / (sequences * R).
    """
    N, G, R = mask.shape
    active = mask.float()
    length = active.sum(-1, keepdim=True)
    return {"grpo": active / length.clamp(min=1) / (length > 0).sum().clamp(min=1),
            "dapo": active / length.sum().clamp(min=1),
            "dr_grpo": active / (N * G * R)}[loss]


def policy_loss(logp: Tensor, old_logp: Tensor, advantage: Tensor, eps_low: float, eps_high: float):
    """Clipped surrogate of each token (to be minimised), and whether the clip decided it."""
    ratio = (logp - old_logp).exp()
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    plain, clipped = ratio * advantage, clipped * advantage
    return -torch.min(plain, clipped), clipped < plain


def token_terms(model: Qwen, hidden: Tensor, teacher: Tensor | None, tokens: Tensor,
                temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and exact distillation KL of each token, all in float32 or wider.

    Logits exist for one chunk of tokens at a time and are recomputed in the backward pass.
    Args:
        hidden: (M, C), what predicts each of the `tokens` (M,).
        teacher: (M, C) from the dense pass, without gradient; None = no KL.
    Returns: logp, entropy (detached), KL(sg[dense] || shadow) over the vocabulary; each (M,).
    """
    def chunk(hidden: Tensor, tokens: Tensor, teacher: Tensor | None):
        z = model.logits(hidden) / temperature
        logp = z.log_softmax(-1)  # (m, V)
        with torch.no_grad():
            lse = z.logsumexp(-1)
            entropy = lse - (logp.exp() * z).sum(-1)  # never 0 * -inf
            kl = torch.zeros_like(entropy)
            if teacher is not None:
                dense = (model.logits(teacher) / temperature).log_softmax(-1)
        if teacher is not None:
            kl = (dense.exp() * (dense - logp)).sum(-1)
        return logp.gather(-1, tokens[:, None])[:, 0], entropy, kl

    size = max(1, LOGIT_BYTES // (4 * model.cfg.V))
    parts = zip(hidden.split(size), tokens.split(size),
                [None] * len(tokens) if teacher is None else teacher.split(size), strict=False)
    out = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    return tuple(torch.cat(x) for x in zip(*out, strict=True))


def group_terms(model: Qwen, rollout: Rollout, n: int, samples: slice, *, temperature: float,
                distil: bool, replay: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`token_terms` of the active tokens of some samples of group n, and their mask; `replay=False`
    is the dense learner: the same pass with a record of nothing evicted."""
    P, R = len(rollout.prompts[n]), int(rollout.lengths[n, samples].max())
    tokens, mask = rollout.tokens[n, samples, :R], rollout.mask[n, samples, :R]
    record = rollout.evict_at[n][:, samples, :, : P + R]
    ids, pos, row = pack(rollout.prompts[n], tokens)
    attend = Replay(record if replay else dense_record(record), P)
    hidden = model(ids, pos, attend)[0]
    teacher = None
    if distil and replay and bool((record != NEVER).any()):
        record = dense_record(record)
        with torch.no_grad():
            if attend.dense_prompt:  # then the prompt's rows are the same in both passes
                dense = Replay(record, P, prompt_kv=attend.prompt_kv)
                responses = model(ids[:, P:], pos[:, P:], dense)[0]
                teacher = torch.cat((hidden[:P].detach(), responses))[row[mask]]
            else:
                teacher = model(ids, pos, Replay(record, P))[0, row[mask]]
    return *token_terms(model, hidden[row[mask]], teacher, tokens[mask], temperature), mask


def backward(model: Qwen, rollout: Rollout, rewards: Tensor, objective: Objective,
             old_logp: Tensor | None = None) -> dict[str, float]:
    """Accumulate the gradient of one optimiser step, group by group, and tell what was seen.
    Args:
        rewards: (N, G) float.
        old_logp: (N, G, R) of the policy before the step; None = the current one (first update).
    Returns: metrics named as in README.md; `loss` is NaN if any token's loss was.
    """
    o = objective
    N, G, _ = rollout.tokens.shape
    advantage = advantages(rewards, scale=o.loss != "dr_grpo").to(rollout.logp)
    weights = token_weights(rollout.mask, o.loss).to(rollout.logp)
    dead, step = dead_groups(rewards), o.micro_samples or G
    names = ("distill/kl", "policy/entropy", "policy/clip_frac")
    seen: dict[str, list[Tensor]] = {key: [] for key in (*names, "loss", "difference")}
    for n in range(N):
        if dead[n] and o.lam == 0:
            continue  # nothing in it has a gradient
        for s in (slice(g, min(g + step, G)) for g in range(0, G, step)):
            logp, entropy, kl, mask = group_terms(
                model, rollout, n, s, temperature=o.temperature, distil=o.lam > 0)
            pick = (n, s, slice(0, mask.shape[1]))
            w, sampled = weights[pick][mask], rollout.logp[pick][mask]
            old = logp.detach() if old_logp is None else old_logp[pick][mask]
            policy, clipped = policy_loss(
                logp, old, advantage[n, s, None].expand(mask.shape)[mask], o.eps_low, o.eps_high)
            loss = (w * (policy + o.lam * kl)).sum()
            loss.backward()
            for key, value in zip(seen, (kl, entropy, clipped, loss[None], logp - sampled),
                                  strict=True):
                seen[key].append(value.detach())
    every = {key: torch.cat([rollout.logp.new_zeros(0), *x]) for key, x in seen.items()}
    tokens = len(every["difference"])
    return {"loss": float(every["loss"].sum()), "tok/learn": tokens,
            "reward/dead_group_frac": float(dead.float().mean()),
            **{key: float(every[key].sum()) / max(1, tokens) for key in names},
            **mismatch(every["difference"])}


def mismatch(difference: Tensor) -> dict[str, float]:
    """Statistics of raw (learner_logp - rollout_logp) over tokens (M,); `kl` is the k3 estimate of
    KL(sampler || learner), E[r - 1 - log r] with r = learner / sampler."""
    d = difference.double() if len(difference) else torch.zeros(1, dtype=torch.float64)
    return {"mismatch/logp_abs_mean": float(d.abs().mean()),
            "mismatch/logp_abs_max": float(d.abs().max()),
            "mismatch/kl": float((d.exp() - 1 - d).mean()),
            "mismatch/ratio_p01": float(d.quantile(0.01).exp())}
