"""The objectives: GRPO on the shadow-masked policy, with a KL to the dense one, and the baselines.

    maximise  E[ L_GRPO(pi(y|x,M)) - lam * KL( sg[pi(y|x)] || pi(y|x,M) ) ]

Track 1 is the masked pass; the teacher of track 2 is a dense pass, in the paper of the same
weights, by default of the initial ones. Both terms are sums over tokens with weights fixed for the
whole optimiser step, so gradients do not depend on how it is split. With one update a rollout the
ratio is 1 and the policy loss near 0.
Sources: SMD arXiv 2605.06850; GRPO arXiv 2402.03300, section 4.1; DAPO arXiv 2503.14476 (token
mean); Dr. GRPO arXiv 2503.20783 (constant denominator, no division by the deviation).
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eviction import NEVER
from model import Qwen
from rollout import Rollout
from shadow_mask import Replay, dense_record, pack

METHODS = ("smd", "dense", "naive", "sparse-rl")
TEACHERS = ("initial", "self")  # whose dense pass is distilled
LOSSES = ("grpo", "dapo", "dr_grpo")
MAX_RHO, MIN_RHO = 1.5, 1e-4  # Sparse-RL: largest weight of a token; below, a sample is rejected
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
    method: str = "smd"  # all others have a dense learner; `sparse-rl` corrects it by weights


def advantages(rewards: Tensor, *, scale: bool) -> Tensor:
    """Rewards (N, G) minus their group's mean, exactly 0 if all are equal; `scale` divides by the
    group's unbiased standard deviation + 1e-6. A NaN reward abstains: advantage 0, in no mean."""
    centred = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale:
        n = (~rewards.isnan()).sum(dim=1, keepdim=True)
        variance = centred.square().nansum(dim=1, keepdim=True) / (n - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + 1e-6)
    return centred.masked_fill(dead_groups(rewards)[:, None] | rewards.isnan(), 0.0)


def dead_groups(rewards: Tensor) -> Tensor:
    """(N,) bool: groups of equal rewards, which teach the policy nothing."""
    low, high = (rewards.nan_to_num(nan=x) for x in (math.inf, -math.inf))
    return low.amin(dim=1) >= high.amax(dim=1)


def token_weights(mask: Tensor, loss: str) -> Tensor:
    """How much each token counts, (N, G, R) float32; the loss is the weighted sum over tokens.
    Args:
        mask: (N, G, R) bool, the active tokens of the whole optimiser step.
        loss: "grpo": mean over the tokens of a sequence, then over sequences; "dapo": mean over
            all tokens; "dr_grpo": sum over tokens / (sequences * R). A sequence without active
            tokens was left out, and is in no denominator.
    """
    R, active = mask.shape[2], mask.float()
    length = active.sum(-1, keepdim=True)
    sequences = (length > 0).sum().clamp(min=1)
    return {"grpo": active / length.clamp(min=1) / sequences,
            "dapo": active / length.sum().clamp(min=1),
            "dr_grpo": active / (sequences * R)}[loss]


def policy_loss(logp: Tensor, old_logp: Tensor, advantage: Tensor, eps_low: float, eps_high: float):
    """Clipped surrogate of each token (to be minimised), and whether the clip decided it."""
    ratio = (logp - old_logp).exp()
    clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
    plain, clipped = ratio * advantage, clipped * advantage
    return -torch.min(plain, clipped), clipped < plain


def token_terms(model: Qwen, hidden: Tensor, teacher: Tensor | None, tokens: Tensor,
                temperature: float, teacher_model: Qwen | None = None
                ) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and exact distillation KL of each token, all in float32 or wider.

    Logits exist for one chunk of tokens at a time and are recomputed in the backward pass.
    Args:
        hidden: (M, C), what predicts each of the `tokens` (M,).
        teacher: (M, C) from the dense pass, without gradient; None = no KL.
        teacher_model: whose pass that was; None = `model`.
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
                dense = ((teacher_model or model).logits(teacher) / temperature).log_softmax(-1)
        if teacher is not None:
            kl = (dense.exp() * (dense - logp)).sum(-1)
        return logp.gather(-1, tokens[:, None])[:, 0], entropy, kl

    size = max(1, LOGIT_BYTES // (4 * model.cfg.V))
    parts = zip(hidden.split(size), tokens.split(size),
                [None] * len(tokens) if teacher is None else teacher.split(size), strict=False)
    out = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    return tuple(torch.cat(x) for x in zip(*out, strict=True))


def group_terms(model: Qwen, rollout: Rollout, n: int, samples: slice, *, temperature: float,
                distil: bool, replay: bool = True, teacher: Qwen | None = None
                ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`token_terms` of the active tokens of some samples of group n, and their mask; `replay=False`
    is the dense learner: the same pass with a record of nothing evicted. The dense teacher has the
    same weights, or those of `teacher`."""
    P, R = len(rollout.prompts[n]), int(rollout.lengths[n, samples].max())
    tokens, mask = rollout.tokens[n, samples, :R], rollout.mask[n, samples, :R]
    record = rollout.evict_at[n][:, samples, :, : P + R]
    ids, pos, row = pack(rollout.prompts[n], tokens)
    attend = Replay(record if replay else dense_record(record), P)
    hidden = model(ids, pos, attend)[0]
    taught = None
    if distil and replay and bool((rollout.evict_at[n] != NEVER).any()):  # of the whole group
        record = dense_record(record)
        with torch.no_grad():
            if teacher is None and attend.dense_prompt:  # the prompt's rows are those of this pass
                dense = Replay(record, P, prompt_kv=attend.prompt_kv)
                responses = model(ids[:, P:], pos[:, P:], dense)[0]
                taught = torch.cat((hidden[:P].detach(), responses))[row[mask]]
            else:
                taught = (teacher or model)(ids, pos, Replay(record, P))[0, row[mask]]
    return *token_terms(model, hidden[row[mask]], taught, tokens[mask], temperature, teacher), mask


@torch.no_grad()
def old_policy(model: Qwen, rollout: Rollout, o: Objective, updates: int = 1) -> Tensor | None:
    """What ratios are taken against, (N, G, R): for SMD the recorded log-probs, for the others
    those of the dense learner before the first update. None = where the ratio is 1 anyway."""
    if o.method == "smd" or (updates == 1 and o.method != "sparse-rl"):
        return rollout.logp if updates > 1 else None
    old = rollout.logp.clone()
    N, G, _ = old.shape
    for n in range(N):
        for s in samples_at_a_time(G, o):
            logp, _, _, mask = group_terms(model, rollout, n, s, temperature=o.temperature,
                                           distil=False, replay=False)
            old[n, s, : mask.shape[1]][mask] = logp
    return old


def samples_at_a_time(G: int, o: Objective) -> list[slice]:
    step = o.micro_samples or G
    return [slice(g, min(g + step, G)) for g in range(0, G, step)]


def sparse_rl(old_logp: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Corrections of Sparse-RL (arXiv 2601.10079), detached: the weight of each token (N, G, R),
    min(rho, 1.5) with rho = old dense / sampler, and the samples (N, G) that hold a rho < 1e-4."""
    rho = (old_logp - rollout.logp).exp().where(rollout.mask, 1.0)
    return rho.clamp(max=MAX_RHO), (rho < MIN_RHO).any(-1)


def backward(model: Qwen, rollout: Rollout, rewards: Tensor, objective: Objective,
             old_logp: Tensor | None = None, teacher: Qwen | None = None) -> dict[str, float]:
    """Accumulate the gradient of one optimiser step, group by group, and tell what was seen.

    Args:
        rewards: (N, G) float, NaN abstains.
        old_logp: (N, G, R), from `old_policy`.
        teacher: of the distillation; None = the model itself, the paper's form.
    Returns: metrics named as in README.md, NaN for a mean of nothing; `loss` is NaN if any token's
        loss was. `mismatch/*` and `policy/*` are over the groups that have a policy gradient.
    """
    o = objective
    N, G, _ = rollout.tokens.shape
    advantage = advantages(rewards, scale=o.loss != "dr_grpo").to(rollout.logp)
    counted = rollout.mask & ~rewards.isnan()[..., None]
    correction = rollout.logp.new_ones(())
    rejected = torch.zeros_like(rollout.stopped)
    if o.method == "sparse-rl":  # a rejected sample leaves numerator and denominator
        correction, rejected = sparse_rl(old_logp, rollout)
        counted = counted & ~rejected[..., None]
    weights = token_weights(counted, o.loss).to(rollout.logp) * correction
    dead, replay = dead_groups(rewards), o.method == "smd"
    lam = o.lam if replay else 0.0
    seen: dict[str, list[Tensor]] = defaultdict(list)
    for n in range(N):
        if dead[n] and lam == 0:
            continue  # nothing in it has a gradient
        for s in samples_at_a_time(G, o):
            logp, entropy, kl, mask = group_terms(model, rollout, n, s, temperature=o.temperature,
                                                  distil=lam > 0, replay=replay,
                                                  teacher=teacher)
            pick = (n, s, slice(0, mask.shape[1]))
            w, sampled = weights[pick][mask], rollout.logp[pick][mask]
            old = logp.detach() if old_logp is None else old_logp[pick][mask]
            policy, clipped = policy_loss(
                logp, old, advantage[n, s, None].expand(mask.shape)[mask], o.eps_low, o.eps_high)
            loss = (w * (policy + lam * kl)).sum()
            if w.any():  # else all were left out: no gradient, and so no step
                loss.backward()
            told = {"loss": loss[None], "distill/kl": kl}
            if not dead[n]:
                told |= {"policy/entropy": entropy, "policy/clip_frac": clipped,
                         "difference": logp - sampled}
            for key, value in told.items():
                seen[key].append(value.detach())
    nothing = rollout.logp.new_zeros(0)
    every = {key: torch.cat(seen.get(key, [nothing])).cpu().double() for key in
             ("loss", "difference", "distill/kl", "policy/entropy", "policy/clip_frac")}
    return {"loss": float(every.pop("loss").sum()), "tok/learn": len(every["distill/kl"]),
            "reward/dead_group_frac": float(dead.float().mean()),
            "reward/abstained_frac": float(rewards.isnan().float().mean()),
            "mismatch/rejected_frac": float(rejected.float().mean()),
            **mismatch(every.pop("difference")),
            **{key: float(x.mean()) for key, x in every.items()}}


def mismatch(difference: Tensor) -> dict[str, float]:
    """Statistics of raw (learner_logp - rollout_logp) over tokens (M,), before any truncation.

    `kl` is the k3 estimate of KL(sampler || learner), E[r - 1 - log r] with r = learner / sampler;
    `ratio_p001`, `p01`, `p05` are the 0.1 %, 1 % and 5 % percentiles of r, `outside_frac` the share
    of tokens with r outside [0.9, 1.1]. All are NaN without a token."""
    d = difference.double() if len(difference) else torch.zeros(1, dtype=torch.float64)
    ratio = d.exp()
    tail = {f"mismatch/ratio_p{name}": float(d.quantile(share).exp())
            for name, share in (("001", 0.001), ("01", 0.01), ("05", 0.05))}
    seen = {"mismatch/logp_abs_mean": float(d.abs().mean()),
            "mismatch/logp_abs_max": float(d.abs().max()),
            "mismatch/kl": float((ratio - 1 - d).mean()), "mismatch/ratio_min": float(ratio.min()),
            "mismatch/outside_frac": float(((ratio < 0.9) | (ratio > 1.1)).double().mean()), **tail}
    return seen if len(difference) else dict.fromkeys(seen, math.nan)
