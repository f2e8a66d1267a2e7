"""grpo.py and optim.py: numbers worked out by hand, and a slow learner on unpacked sequences.

The reference runs one response at a time, with a (heads, T, T) boolean mask filled by loops from
the record, its own attention, its own advantages and weights. It shares nothing with the code under
test but the network.
"""

import copy
import io
import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import grpo
from eviction import DENSE, NEVER, Eviction
from grpo import (
    LOSSES,
    Objective,
    advantages,
    backward,
    dead_groups,
    group_terms,
    mismatch,
    policy_loss,
    token_terms,
    token_weights,
)
from model import ModelConfig, Qwen
from optim import MasterOptimizer
from rollout import Rollout, generate

torch.set_num_threads(1)
F64 = torch.float64


def config(**more):
    tiny = dict(V=23, C=16, L=2, Hq=4, Hkv=2, D=8, ffn=24, eps=1e-6, rope_theta=100.0, tied=True,
                qkv_bias=False, qk_norm=True, hf={})
    return ModelConfig(**tiny | more)


def tiny_model(dtype=F64, seed=0, **more):
    """A random Qwen3 whose attention is peaked: what a key hides or shows must matter."""
    model = Qwen(config(**more)).to(dtype)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=rng, dtype=F64)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p.copy_(1.5 + 0.3 * noise)
            elif name.endswith("norm.weight"):
                p.copy_(1 + 0.2 * noise)
            elif "embed" in name or "head" in name:
                p.copy_(0.4 * noise)
            else:
                p.copy_(1.5 * noise / p.shape[1] ** 0.5)
    return model


EVICTING = Eviction("random", keep=0.4, sinks=1, window=2)


def sampled(model, eviction=EVICTING, **more):
    """3 prompts of other lengths, 4 samples each, of 1 to 7 tokens."""
    rng = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 23, (P,), generator=rng).tolist() for P in (13, 9, 16)]
    return generate(model, prompts, sequence=[5, 2, 8], G=4, max_new=7, stop_ids=frozenset({3, 4}),
                    eviction=eviction, **more)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def rollout(model):
    r = sampled(model)
    assert len(set(r.lengths.flatten().tolist())) >= 4, r.lengths
    return r


# The second group is dead.
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 0.5], [0.3] * 4, [0.0, 1.0, 2.0, 0.25]], dtype=F64)


def each_its_own(rollout):
    """The rollout with a random record: every sample loses other keys, at other times."""
    rng = torch.Generator().manual_seed(2)
    records = []
    for prompt, record in zip(rollout.prompts, rollout.evict_at, strict=True):
        P, T = len(prompt), record.shape[3]
        lost = torch.rand(record.shape, generator=rng) < 0.5
        when = torch.randint(0, 5, record.shape, generator=rng) + P
        first = torch.arange(T) + 1  # a key is seen by its own query
        records.append(torch.where(lost, torch.maximum(when, first), NEVER).to(torch.int32))
    return replace(rollout, evict_at=records)


# --- the reference -------------------------------------------------------------------------------


def plain_attend(record, T):
    """Attention over one whole sequence; record (L, Hkv, >= T), None = dense."""

    def attend(layer, q, k, v):
        _, Hq, _, D = q.shape
        groups = Hq // k.shape[1]
        o = []
        for h in range(Hq):
            mask = torch.zeros(T, T, dtype=torch.bool)
            for i in range(T):
                for j in range(i + 1):
                    mask[i, j] = record is None or i < record[layer][h // groups][j]
            z = (q[0, h] @ k[0, h // groups].T / math.sqrt(D)).masked_fill(~mask, -math.inf)
            o.append(torch.softmax(z, -1) @ v[0, h // groups])
        return torch.stack(o)[None]

    return attend


def sequence_terms(model, rollout, n, g, temperature=1.0, dense=False, teacher=None):
    """Log-probs, entropies and KLs of the tokens of one sample; the teacher is another model's."""
    prompt, length = rollout.prompts[n].tolist(), int(rollout.lengths[n, g])
    response = rollout.tokens[n, g, :length].tolist()
    ids = torch.tensor([prompt + response])
    P, T = len(prompt), ids.shape[1]
    record = None if dense else rollout.evict_at[n][:, g].tolist()

    def predict(record, model=model):
        head = model.embed_tokens.weight if model.cfg.tied else model.lm_head.weight
        hidden = model(ids, torch.arange(T)[None], plain_attend(record, T))[0]
        return torch.softmax(hidden[P - 1 : T - 1] @ head.T / temperature, -1)

    shadow = predict(record)
    with torch.no_grad():
        teacher = predict(None, teacher or model)
    logp = torch.stack([shadow[t, token].log() for t, token in enumerate(response)])
    entropy = -(shadow * shadow.log()).sum(-1)
    return logp, entropy, (teacher * (teacher / shadow).log()).sum(-1)


def reference(model, rollout, rewards, loss, lam, *, temperature=1.0, dense=False, ratio=None,
              mean_per_sample=False, teacher=None):
    """Gradients of the step, its loss, mean KL, and mean entropy of the groups that live."""
    N, G, R = rollout.tokens.shape
    total, kls, entropies = 0.0, [], []
    one = torch.ones(())  # weights are float32: 1 / n is rounded once
    for n in range(N):
        r = rewards[n].tolist()
        scale = 1.0 if loss == "dr_grpo" else statistics.stdev(r) + 1e-6
        for g in range(G):
            a = 0.0 if len(set(r)) == 1 else (r[g] - statistics.fmean(r)) / scale
            logp, entropy, kl = sequence_terms(model, rollout, n, g, temperature, dense, teacher)
            w = {"dapo": one / int(rollout.lengths.sum()), "dr_grpo": one / (N * G * R),
                 "grpo": one / len(logp) / (N * G)}[loss].item()
            if mean_per_sample:
                w = 1 / len(logp) / (N * G)
            for t in range(len(logp)):
                # the value of the surrogate where the ratio is 1 or given, and its gradient
                c = 1.0 if ratio is None else ratio[n, g, t].item()
                if (a > 0 and c > 1.2) or (a < 0 and c < 0.8):
                    policy = -a * (1.2 if a > 0 else 0.8)
                else:
                    policy = -a * c * (logp[t] - logp[t].detach()).exp()
                total = total + w * (policy + lam * kl[t])
            kls += kl.tolist()
            entropies += entropy.tolist() if len(set(r)) > 1 else []
    grads = torch.autograd.grad(total, list(model.parameters()))
    return flat(grads), total.item(), statistics.fmean(kls), statistics.fmean(entropies)


def flat(grads):
    return torch.cat([g.flatten() for g in grads])


def step_gradient(model, rollout, rewards, objective, **more):
    model.zero_grad(set_to_none=True)
    metrics = backward(model, rollout, rewards, objective, **more)
    return flat([torch.zeros_like(p) if p.grad is None else p.grad
                 for p in model.parameters()]), metrics


def gap(a, b):
    assert a.shape == b.shape, (a.shape, b.shape)
    return (a - b).abs().max().item()


# --- advantages and weights ----------------------------------------------------------------------


@pytest.mark.parametrize("rewards, scaled, plain", [
    # mean 0.5, unbiased variance (0.25 + 0.25) / 1; mean 3, variance (4 + 4) / 1
    ([[1, 0], [1, 5]],
     [[0.7071058, -0.7071058], [-0.7071065, 0.7071065]], [[0.5, -0.5], [-2, 2]]),
    # mean 0.25, variance (0.5625 + 3 * 0.0625) / 3 = 0.25; mean 2, variance 8 / 3
    ([[1, 0, 0, 0], [4, 2, 0, 2]],
     [[1.499997, -0.499999, -0.499999, -0.499999], [1.2247441, 0, -1.2247441, 0]],
     [[0.75, -0.25, -0.25, -0.25], [2, 0, -2, 0]]),
])
def test_advantages_by_hand(rewards, scaled, plain):
    rewards = torch.tensor(rewards, dtype=F64)
    assert gap(advantages(rewards, scale=True), torch.tensor(scaled, dtype=F64)) < 1e-7
    assert gap(advantages(rewards, scale=False), torch.tensor(plain, dtype=F64)) < 1e-15
    alone = advantages(rewards[:1], scale=True)
    assert torch.equal(alone, advantages(torch.cat((rewards[:1], rewards + 9)), scale=True)[:1])


@pytest.mark.parametrize("scale", [True, False])
def test_a_dead_group_has_no_advantage_even_where_it_does_not_centre(scale):
    rewards = torch.tensor([[0.1] * 7, [0.1] * 6 + [0.2]])
    assert (rewards[0] - rewards[0].mean()).abs().max() > 0  # the control: float32 leaves a rest
    a = advantages(rewards, scale=scale)
    assert a[0].tolist() == [0.0] * 7 and (a[1] != 0).all()
    assert dead_groups(rewards).tolist() == [True, False]


def masks(*lengths, R=3):
    return torch.arange(R) < torch.tensor(lengths)[..., None]


@pytest.mark.parametrize("loss, weights, total", [
    ("grpo", [1 / 4, 1 / 12, 1 / 8, 1 / 8], 1.0),  # 1 / (4 sequences * length)
    ("dapo", [1 / 8] * 4, 1.0),  # 8 tokens
    ("dr_grpo", [1 / 12] * 4, 8 / 12),  # 4 sequences * R = 3
])
def test_token_weights_by_hand(loss, weights, total):
    mask = masks([1, 3], [2, 2])
    w = token_weights(mask, loss)
    assert w.dtype == torch.float32
    assert gap(w, mask * torch.tensor(weights).view(2, 2, 1)) < 1e-8
    assert w.sum().item() == pytest.approx(total, abs=1e-7)
    # A sample without tokens leaves the denominator too: 3 sequences, 7 tokens; R stays R.
    w = token_weights(masks([0, 3], [2, 2]), loss)
    expected = {"grpo": [0, 1 / 9, 1 / 6, 1 / 6], "dapo": [1 / 7] * 4, "dr_grpo": [1 / 9] * 4}
    assert gap(w, masks([0, 3], [2, 2]) * torch.tensor(expected[loss]).view(2, 2, 1)) < 1e-8
    assert token_weights(masks([0, 0], [0, 0]), loss).abs().sum() == 0


# --- the clipped surrogate -----------------------------------------------------------------------


@pytest.mark.parametrize("a, ratios, losses, flags, slopes", [
    # one ratio a token; their geometric mean, 1.14, would clip none of them
    (1.0, [1.1, 0.9, 1.5], [-1.1, -0.9, -1.2], [0, 0, 1], [-1.1, -0.9, 0]),
    (-1.0, [1.1, 0.9, 1.5], [1.1, 0.9, 1.5], [0, 0, 0], [1.1, 0.9, 1.5]),
    (2.0, [0.5, 0.7, 1.3], [-1.0, -1.4, -2.4], [0, 0, 1], [-1.0, -1.4, 0]),
    (-2.0, [0.5, 0.7, 1.3], [1.6, 1.6, 2.6], [1, 1, 0], [0, 0, 2.6]),
    (0.0, [0.5, 1.0, 1.5], [0, 0, 0], [0, 0, 0], [0, 0, 0]),
])
def test_policy_loss_by_hand(a, ratios, losses, flags, slopes):
    old = torch.tensor([-1.0, -0.5, -2.0], dtype=F64)
    logp = (old + torch.tensor(ratios, dtype=F64).log()).requires_grad_()
    loss, clipped = policy_loss(logp, old, torch.tensor(a, dtype=F64), 0.2, 0.2)
    assert gap(loss, torch.tensor(losses, dtype=F64)) < 1e-12
    assert clipped.dtype == torch.bool and clipped.int().tolist() == flags
    slope = torch.autograd.grad(loss.sum(), logp)[0]
    assert gap(slope, torch.tensor(slopes, dtype=F64)) < 1e-12


def test_policy_loss_with_unequal_bounds():
    ratio = torch.tensor([1.3, 1.5, 0.7, 0.75], dtype=F64)
    a = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=F64)
    loss, clipped = policy_loss(ratio.log(), torch.zeros(4, dtype=F64), a, 0.28, 0.4)
    # bounds [0.72, 1.4]
    assert gap(loss, torch.tensor([-1.3, -1.4, 0.72, 0.75], dtype=F64)) < 1e-12
    assert clipped.tolist() == [False, True, True, False]


def test_at_ratio_one_the_gradient_is_advantage_times_that_of_logp():
    a = torch.tensor([0.7, -1.3, 0.0], dtype=F64)
    logp = torch.tensor([-0.1, -3.0, -1.0], dtype=F64, requires_grad=True)
    loss, clipped = policy_loss(logp, logp.detach(), a, 0.2, 0.2)
    assert gap(torch.autograd.grad(loss.sum(), logp)[0], -a) < 1e-15 and not clipped.any()


# --- log-prob, entropy and KL of a token ---------------------------------------------------------


def head(V, dtype=F64):
    """A network whose head is the identity: its hidden states are the logits."""
    model = Qwen(config(V=V, C=V, L=0, tied=False)).to(dtype)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.eye(V))
    return model


def softened(p, temperature):
    p = [x ** (1 / temperature) for x in p]
    return [x / sum(p) for x in p]


def divergence(p, q):
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_token_terms_of_three_tokens(temperature):
    dense, shadow = [0.5, 0.25, 0.25], [0.75, 0.125, 0.125]
    hidden = torch.tensor([shadow], dtype=F64).log() + 5  # a constant changes no distribution
    teacher = torch.tensor([dense], dtype=F64).log()
    logp, entropy, kl = token_terms(head(3), hidden, teacher, torch.tensor([2]), temperature)
    p, q = softened(dense, temperature), softened(shadow, temperature)
    if temperature == 1:  # 0.5 ln(2/3) + 0.5 ln 2; 0.75 ln 1.5 - 0.25 ln 2; ...
        assert divergence(p, q) == pytest.approx(0.1438410, abs=1e-7)
        assert divergence(q, p) == pytest.approx(0.1308120, abs=1e-7)
        assert logp.item() == pytest.approx(-2.0794415, abs=1e-7)
        assert entropy.item() == pytest.approx(0.7356220, abs=1e-7)
    assert logp.item() == pytest.approx(math.log(q[2]), abs=1e-12)
    assert entropy.item() == pytest.approx(-sum(x * math.log(x) for x in q), abs=1e-12)
    assert kl.item() == pytest.approx(divergence(p, q), abs=1e-12)
    assert abs(kl.item() - divergence(q, p)) > 1e-4  # the control: the other direction
    nothing = token_terms(head(3), hidden, None, torch.tensor([2]), temperature)
    assert nothing[2].tolist() == [0.0] and gap(nothing[0], logp) == 0


def test_the_teacher_carries_no_gradient():
    model, rng = tiny_model(tied=False), torch.Generator().manual_seed(3)
    hidden, teacher = (torch.randn(5, 16, generator=rng, dtype=F64).requires_grad_()
                       for _ in range(2))
    _, entropy, kl = token_terms(model, hidden, teacher, torch.zeros(5, dtype=torch.int64), 0.7)
    assert not entropy.requires_grad
    kl.sum().backward()
    assert teacher.grad is None
    # d KL(p || q) / d logits = (q - p) / T, through the student's side of the head alone
    W = model.lm_head.weight.detach()
    q, p = ((x.detach() @ W.T / 0.7).softmax(-1) for x in (hidden, teacher))
    assert gap(hidden.grad, (q - p) / 0.7 @ W) < 1e-12
    assert gap(model.lm_head.weight.grad, (q - p).T / 0.7 @ hidden.detach()) < 1e-12
    assert gap(model.lm_head.weight.grad, (q - p).T / 0.7 @ (hidden - teacher).detach()) > 1e-2


def test_kl_gradient_is_that_of_finite_differences():
    rng = torch.Generator().manual_seed(4)
    hidden, teacher = (torch.randn(3, 6, generator=rng, dtype=F64) for _ in range(2))
    model, tokens, h = head(6), torch.tensor([1, 0, 5]), 1e-5

    def kl(hidden):
        return token_terms(model, hidden, teacher, tokens, 0.7)[2].sum()

    x = hidden.clone().requires_grad_()
    got = torch.autograd.grad(kl(x), x)[0]
    for i in range(3):
        for j in range(6):
            e = torch.zeros(3, 6, dtype=F64)
            e[i, j] = h
            slope = (kl(hidden + e) - kl(hidden - e)).item() / (2 * h)
            assert got[i, j].item() == pytest.approx(slope, abs=1e-9)
    assert got.abs().max() > 0.05


def test_the_sampled_log_ratio_alone_would_teach_nothing():
    """Expectations over the whole vocabulary, exact: each token once, weighted by its chance."""
    rng = torch.Generator().manual_seed(5)
    hidden = torch.randn(1, 7, generator=rng, dtype=F64).requires_grad_()
    teacher = torch.randn(1, 7, generator=rng, dtype=F64)
    q = hidden.detach().softmax(-1)[0]
    logp, _, kl = token_terms(head(7), hidden.expand(7, 7), teacher.expand(7, 7),
                              torch.arange(7), 1.0)
    log_ratio = teacher.log_softmax(-1)[0] - logp
    assert gap(torch.autograd.grad((q * log_ratio).sum(), hidden, retain_graph=True)[0],
               torch.zeros(1, 7, dtype=F64)) < 1e-15
    assert gap(torch.autograd.grad((q * kl).sum(), hidden)[0], q - teacher.softmax(-1)) < 1e-15
    assert gap(q[None], teacher.softmax(-1)) > 0.05


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_entropy_and_gradient_stay_finite_where_probabilities_vanish(dtype):
    hidden = torch.tensor([[0, -1e4, 0], [-1e4, 1e4, -1e4]], dtype=dtype).requires_grad_()
    teacher = torch.tensor([[0, 0, -1e4], [0, 1e4, 0]], dtype=dtype)
    logp, entropy, kl = token_terms(head(3, dtype), hidden, teacher, torch.tensor([0, 1]), 1.0)
    assert entropy.tolist() == pytest.approx([math.log(2), 0], abs=1e-6)
    assert logp.tolist() == pytest.approx([-math.log(2), 0], abs=1e-6)
    # 0.5 (ln 0.5 - ln 0.5) + 0.5 (ln 0.5 + 1e4 + ln 2)
    assert kl.tolist() == pytest.approx([5000, 0], rel=1e-6)
    (logp.sum() + kl.sum()).backward()
    assert hidden.grad.isfinite().all()


def test_bfloat16_weights_have_float32_log_probs():
    rng = torch.Generator().manual_seed(6)
    model = tiny_model(torch.bfloat16)
    hidden, teacher = (torch.randn(50, 16, generator=rng).bfloat16() for _ in range(2))
    tokens = torch.randint(0, 23, (50,), generator=rng)
    terms = token_terms(model, hidden, teacher, tokens, 0.7)
    assert [x.dtype for x in terms] == [torch.float32] * 3
    z, dense = ((x @ model.embed_tokens.weight.T) for x in (hidden, teacher))  # as the head rounds
    exact = (z.double() / 0.7).log_softmax(-1)
    p = (dense.double() / 0.7).softmax(-1)
    expected = (exact.gather(1, tokens[:, None])[:, 0], -(exact.exp() * exact).sum(-1),
                (p * (p.log() - exact)).sum(-1))
    for got, want in zip(terms, expected, strict=True):
        assert gap(got.double(), want) < 1e-5
    coarse = (z / 0.7).log_softmax(-1).double()
    assert gap(coarse, exact) > 1e-3  # the control: the same in bfloat16


class Largest(TorchDispatchMode):
    """The most elements of any storage that an operation has returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements,
                                    x.untyped_storage().nbytes() // x.element_size())
        return out


def test_chunks_give_the_same_and_bound_every_tensor(monkeypatch):
    V, C, M, chunk = 64, 6, 43, 8  # 43 is no multiple of 8
    model, rng = tiny_model(V=V, C=C, L=0), torch.Generator().manual_seed(7)
    hidden, teacher = (torch.randn(M, C, generator=rng, dtype=F64) for _ in range(2))
    tokens = torch.randint(0, V, (M,), generator=rng)
    weight = torch.randn(2, M, generator=rng, dtype=F64)

    def run(logit_bytes):
        monkeypatch.setattr(grpo, "LOGIT_BYTES", logit_bytes)
        x, saved = hidden.clone().requires_grad_(), [0]
        model.zero_grad(set_to_none=True)

        def keep(t):
            saved[0] += t.numel()
            return t

        with Largest() as largest:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                terms = token_terms(model, x, teacher, tokens, 0.7)
            (weight[0] @ terms[0] + weight[1] @ terms[2]).backward()
        values = [*terms, x.grad, model.embed_tokens.weight.grad]
        return [v.detach().clone() for v in values], largest.elements, saved[0]

    many, bound, saved = run(4 * V * chunk)
    one, whole, _ = run(2**27)
    assert max(gap(a, b) for a, b in zip(many, one, strict=True)) < 1e-12
    assert V * C < bound <= chunk * V
    assert whole == M * V > chunk * V  # the control: one chunk holds all logits
    assert saved < M * V // 4  # no logits are kept for the backward pass
    tiny, _, _ = run(1)  # less than one token's logits: one token at a time
    assert max(gap(a, b) for a, b in zip(tiny, one, strict=True)) < 1e-12


# --- one optimiser step --------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.0, 0.1])
@pytest.mark.parametrize("loss", LOSSES)
def test_step_equals_the_reference_however_it_is_split(model, rollout, loss, lam, monkeypatch):
    expected, value, kl, _ = reference(model, rollout, REWARDS, loss, lam)
    assert expected.abs().max() > 1e-2
    objective = Objective(loss=loss, lam=lam)
    for micro in (0, 1, 2, 3):
        for checkpointing in (False, True):
            model.checkpointing = checkpointing
            got, metrics = step_gradient(model, rollout, REWARDS,
                                         replace(objective, micro_samples=micro))
            assert gap(got, expected) < 1e-10, (micro, checkpointing)
            assert metrics["loss"] == pytest.approx(value, abs=1e-10)
            assert metrics["mismatch/logp_abs_max"] < 1e-9
            assert metrics["distill/kl"] == pytest.approx(kl if lam else 0.0, abs=1e-10)
            assert metrics["policy/clip_frac"] == 0
    model.checkpointing = False
    order = [2, 0, 1]
    shuffled = Rollout(
        sequence=[rollout.sequence[i] for i in order], prompts=[rollout.prompts[i] for i in order],
        tokens=rollout.tokens[order], lengths=rollout.lengths[order],
        stopped=rollout.stopped[order], logp=rollout.logp[order],
        evict_at=[rollout.evict_at[i] for i in order], kv_bytes_peak=0, kv_bytes_dense=0)
    assert gap(step_gradient(model, shuffled, REWARDS[order], objective)[0], expected) < 1e-10
    monkeypatch.setattr(grpo, "LOGIT_BYTES", 4 * 23 * 3)
    assert gap(step_gradient(model, rollout, REWARDS, objective)[0], expected) < 1e-10
    # Controls: the dense learner, and a mean per micro-batch, which "grpo" alone is anyway.
    assert gap(reference(model, rollout, REWARDS, loss, lam, dense=True)[0], expected) > 1e-2
    mean = reference(model, rollout, REWARDS, loss, lam, mean_per_sample=True)[0]
    assert (gap(mean, expected) > 1e-3) == (loss != "grpo")


@pytest.mark.parametrize("loss", LOSSES)
def test_every_sample_replays_its_own_record(model, rollout, loss):
    own = each_its_own(rollout)
    expected, value, kl, entropy = reference(model, own, REWARDS, loss, 0.1)
    for micro in (0, 1, 3):
        got, metrics = step_gradient(model, own, REWARDS, Objective(loss=loss, micro_samples=micro))
        assert gap(got, expected) < 1e-10, micro
        assert metrics["loss"] == pytest.approx(value, abs=1e-10)
        assert metrics["distill/kl"] == pytest.approx(kl, abs=1e-10) and kl > 0.1
        assert metrics["policy/entropy"] == pytest.approx(entropy, abs=1e-10)
        assert metrics["reward/dead_group_frac"] == pytest.approx(1 / 3)
        assert metrics["tok/learn"] == int(rollout.lengths.sum())
    swapped = replace(own, evict_at=[x.flip(1) for x in own.evict_at])
    assert gap(step_gradient(model, swapped, REWARDS, Objective(loss=loss))[0], expected) > 1e-2


def passes(model, call, *args, **kwargs):
    """What a call returns, and the row length of every forward pass it makes."""
    rows = []
    hook = model.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    out = call(*args, **kwargs)
    hook.remove()
    return out, rows


def test_group_terms_replay_or_not(model, rollout):
    n, samples = 0, slice(2, 4)
    P, R = len(rollout.prompts[n]), int(rollout.lengths[n, samples].max())
    assert R < rollout.lengths[n].max()  # shorter than the group's longest, and so are the rows
    for replay in (True, False):
        (logp, _, kl, mask), rows = passes(model, group_terms, model, rollout, n, samples,
                                           temperature=1.0, distil=True, replay=replay)
        want = [sequence_terms(model, rollout, n, g, dense=not replay) for g in (2, 3)]
        assert gap(logp, torch.cat([x[0] for x in want])) < 1e-10
        assert gap(kl, torch.cat([x[2] for x in want]) * replay) < 1e-10
        # the prompt once, in the masked pass; the dense learner needs no teacher
        assert rows == ([P + 2 * R, 2 * R] if replay else [P + 2 * R])
        assert mask.shape == (2, R)
        assert mask.sum(1).tolist() == rollout.lengths[n, samples].tolist()
    shadow = [sequence_terms(model, rollout, n, g)[0] for g in (2, 3)]
    assert gap(logp, torch.cat(shadow)) > 1e-2  # the control: the two learners differ


@pytest.mark.parametrize("micro", [0, 3])
def test_another_model_teaches(model, rollout, micro):
    """Its whole dense pass, and no gradient of its own."""
    other = tiny_model(seed=1)
    want, loss, kl, _ = reference(model, rollout, REWARDS, "dapo", 0.5, teacher=other)
    model.zero_grad()
    half = Objective(lam=0.5, micro_samples=micro)
    metrics = backward(model, rollout, REWARDS, half, None, other)
    assert gap(flat([p.grad for p in model.parameters()]), want) < 1e-9
    assert metrics["loss"] == pytest.approx(loss, abs=1e-9)
    assert metrics["distill/kl"] == pytest.approx(kl, rel=1e-9)
    assert all(p.grad is None for p in other.parameters())
    itself, _ = step_gradient(model, rollout, REWARDS, Objective(lam=0.5))
    assert gap(itself, want) > 1e-2  # the control
    model.zero_grad()
    backward(model, rollout, REWARDS, Objective(lam=0.5), None, copy.deepcopy(model))
    assert gap(flat([p.grad for p in model.parameters()]), itself) < 1e-9


def test_a_sample_that_lost_nothing_is_taught_as_well(model):
    """By another teacher, if its group lost keys: gradients do not depend on the split."""
    budget = Eviction("random", budget=10, evict_every=3, sinks=1, window=2)
    rollout = sampled(model, budget)
    lost = torch.stack([(x != NEVER).any(-1).any(-1).any(0) for x in rollout.evict_at])
    assert (lost.any(1) & ~lost.all(1)).any(), "some sample of a group evicts nothing"
    found = []
    for micro in (0, 1):
        model.zero_grad()
        metrics = backward(model, rollout, REWARDS, Objective(lam=0.5, micro_samples=micro), None,
                           tiny_model(seed=1))
        found.append((flat([p.grad for p in model.parameters()]), metrics["distill/kl"]))
    assert gap(found[0][0], found[1][0]) < 1e-12 and found[0][1] == pytest.approx(found[1][1])


@pytest.mark.parametrize("lam", [0.0, 0.1])
def test_metrics_are_over_the_groups_with_a_policy_gradient(model, rollout, lam):
    """Whatever is distilled besides; and NaN, not 0, where there is none."""
    _, metrics = step_gradient(model, rollout, REWARDS, Objective(lam=lam))
    live = [n for n in range(3) if len(set(REWARDS[n].tolist())) > 1]
    assert len(live) == 2
    entropies = torch.cat([sequence_terms(model, rollout, n, g)[1] for n in live for g in range(4)])
    assert metrics["policy/entropy"] == pytest.approx(entropies.mean().item(), rel=1e-9)
    if lam:
        kls = torch.cat([sequence_terms(model, rollout, n, g)[2] for n in range(3)
                         for g in range(4)])
        assert metrics["distill/kl"] == pytest.approx(kls.mean().item(), rel=1e-9)
    _, metrics = step_gradient(model, rollout, torch.ones(3, 4), Objective(lam=lam))
    nothing = {key for key, x in metrics.items() if math.isnan(x)}
    assert {"policy/entropy", "policy/clip_frac", "mismatch/kl", "mismatch/ratio_p01"} <= nothing
    assert math.isnan(metrics["distill/kl"]) == (lam == 0) and metrics["loss"] >= 0


def test_dead_groups_are_skipped_without_lambda(model, rollout, monkeypatch):
    visited = []

    def spy(model, rollout, n, *args, **kwargs):
        visited.append(n)
        return group_terms(model, rollout, n, *args, **kwargs)

    monkeypatch.setattr(grpo, "group_terms", spy)
    skipped, metrics = step_gradient(model, rollout, REWARDS, Objective(lam=0.0))
    assert visited == [0, 2] and metrics["reward/dead_group_frac"] == pytest.approx(1 / 3)
    assert metrics["tok/learn"] == int(rollout.lengths[[0, 2]].sum())
    visited.clear()  # a lambda below any rounding visits all groups and adds nothing
    every, _ = step_gradient(model, rollout, REWARDS, Objective(lam=1e-300))
    assert visited == [0, 1, 2] and gap(skipped, every) < 1e-15 and skipped.abs().max() > 1e-2


def test_nothing_evicted_has_no_distillation(model):
    full = sampled(model, DENSE)
    alone, _ = step_gradient(model, full, REWARDS, Objective(lam=0.0))
    (both, metrics), rows = passes(model, step_gradient, model, full, REWARDS, Objective(lam=0.1))
    assert metrics["distill/kl"] == 0.0 and gap(both, alone) < 1e-15
    assert len(rows) == 3  # and no teacher pass: one a group
    evicted = sampled(model)
    both, metrics = step_gradient(model, evicted, REWARDS, Objective(lam=0.1))
    assert metrics["distill/kl"] > 0.01
    assert gap(both, step_gradient(model, evicted, REWARDS, Objective(lam=0.0))[0]) > 1e-3


@pytest.mark.parametrize("loss", LOSSES)
def test_rewards_that_say_nothing_teach_nothing(model, rollout, loss):
    equal, metrics = step_gradient(model, rollout, torch.full((3, 4), 0.1), Objective(loss, 0.0))
    assert not equal.any() and metrics["loss"] == 0 and metrics["tok/learn"] == 0
    assert metrics["reward/dead_group_frac"] == 1 and math.isnan(metrics["mismatch/ratio_p01"])
    pulled, _ = step_gradient(model, rollout, torch.full((3, 4), 0.1), Objective(loss, 0.1))
    assert pulled.abs().max() > 1e-4  # distillation needs no reward
    # Rewards dealt without regard to the response: over both deals the gradient is zero.
    one, _ = step_gradient(model, rollout, REWARDS, Objective(loss, 0.0))
    two, _ = step_gradient(model, rollout, 3 - REWARDS, Objective(loss, 0.0))
    assert gap(one, -two) < 1e-14 and one.abs().max() > 1e-2


def test_old_log_probs_give_ratios_that_clip(model, rollout):
    rng = torch.Generator().manual_seed(8)
    choices = torch.tensor([0.5, 0.9, 1.1, 1.5], dtype=F64)
    ratio = choices[torch.randint(0, 4, rollout.tokens.shape, generator=rng)]
    old = rollout.logp - ratio.log()
    expected, value, _, _ = reference(model, rollout, REWARDS, "dapo", 0.1, ratio=ratio)
    # 1.5 is clipped where the advantage is positive, 0.5 where it is negative
    up = torch.zeros(3, 4, 1, dtype=torch.bool)
    up[0, 0] = up[0, 3] = up[2, 1] = up[2, 2] = True  # means 0.375 and 0.8125
    down = ~up
    down[1] = False
    clips = ((ratio == 1.5) & up | (ratio == 0.5) & down) & rollout.mask
    frac = int(clips.sum()) / int(rollout.lengths[[0, 2]].sum())  # group 1 is dead
    assert 0.1 < frac < 0.5
    for micro in (0, 1, 3):
        got, metrics = step_gradient(model, rollout, REWARDS, Objective(micro_samples=micro),
                                     old_logp=old)
        assert gap(got, expected) < 1e-10
        assert metrics["loss"] == pytest.approx(value, abs=1e-10)
        assert metrics["policy/clip_frac"] == pytest.approx(frac)
        assert metrics["mismatch/logp_abs_max"] < 1e-9  # against the sampler, not against old
    assert gap(step_gradient(model, rollout, REWARDS, Objective())[0], expected) > 1e-2


def test_the_temperature_is_replayed(model):
    warm = sampled(model, temperature=0.7)
    got, metrics = step_gradient(model, warm, REWARDS, Objective(temperature=0.7))
    assert metrics["mismatch/logp_abs_max"] <= 1e-9 and metrics["mismatch/kl"] <= 1e-9
    expected, value, kl, entropy = reference(model, warm, REWARDS, "dapo", 0.1, temperature=0.7)
    assert gap(got, expected) < 1e-10
    assert metrics["loss"] == pytest.approx(value, abs=1e-10)
    assert metrics["distill/kl"] == pytest.approx(kl, abs=1e-10)
    assert metrics["policy/entropy"] == pytest.approx(entropy, abs=1e-10)
    wrong, metrics = step_gradient(model, warm, REWARDS, Objective(temperature=1.0))
    assert metrics["mismatch/logp_abs_max"] > 0.1 and gap(wrong, expected) > 1e-2


def test_the_mismatch_of_a_step_is_that_of_its_tokens(model, rollout):
    """Padding and its log-prob 0 are no tokens; a shifted sampler shows as it is."""
    shifted = replace(rollout, logp=rollout.logp - 0.5)  # the learner is e^0.5 times as sure
    _, metrics = step_gradient(model, shifted, REWARDS, Objective())
    assert metrics["mismatch/logp_abs_mean"] == pytest.approx(0.5, abs=1e-9)
    assert metrics["mismatch/logp_abs_max"] == pytest.approx(0.5, abs=1e-9)
    assert metrics["mismatch/kl"] == pytest.approx(0.1487213, abs=1e-7)  # e^0.5 - 1 - 0.5
    assert metrics["mismatch/ratio_p01"] == pytest.approx(1.6487213, abs=1e-7)


def test_bfloat16_step_is_finite_and_near_the_exact_one():
    model = tiny_model(torch.bfloat16)
    r = sampled(model)
    assert r.logp.dtype == torch.float32
    got, metrics = step_gradient(model, r, REWARDS.float(), Objective())
    assert got.isfinite().all() and math.isfinite(metrics["loss"])
    exact = tiny_model(torch.bfloat16).double()
    expected = reference(exact, r, REWARDS, "dapo", 0.1)[0]
    assert torch.cosine_similarity(got.double(), expected, dim=0) > 0.98


def test_a_nan_weight_shows_in_the_loss(rollout):
    broken = tiny_model()
    with torch.no_grad():
        broken.norm.weight[0] = math.nan
    assert math.isnan(step_gradient(broken, rollout, REWARDS, Objective())[1]["loss"])


# --- the direction of learning -------------------------------------------------------------------


def test_the_rewarded_tokens_rise_and_not_those_one_position_on():
    """A table: the logits after token i are 2 * W[:, i], so the gradient is known by hand.

    Prompt 0; response [1, 2] with reward 1, [3, 1] with reward 0. Advantages 0.5 and -0.5, each
    token weighs 1 / 4, W = 0, so every probability is 1 / 4.
    """
    model = Qwen(config(V=4, C=4, L=0, tied=False, eps=0.0)).double()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(torch.eye(4))  # normalised: 2 e_i
        model.lm_head.weight.zero_()
    model.embed_tokens.requires_grad_(False)
    model.norm.requires_grad_(False)
    tokens = torch.tensor([[[1, 2], [3, 1]]])
    r = Rollout(sequence=[0], prompts=[torch.tensor([0])], tokens=tokens,
                lengths=torch.tensor([[2, 2]]), stopped=torch.tensor([[False, False]]),
                logp=torch.full((1, 2, 2), -math.log(4), dtype=F64),
                evict_at=[torch.full((0, 2, 2, 3), NEVER, dtype=torch.int32)],
                kv_bytes_peak=0, kv_bytes_dense=0)
    optim = MasterOptimizer(model, lr=0.01, max_grad_norm=1.0)
    metrics = backward(model, r, torch.tensor([[1.0, 0.0]]), Objective("dr_grpo", lam=0.0))
    assert metrics["mismatch/logp_abs_max"] < 1e-12
    # columns: after 0, after 1, after 2 (never a context), after 3; rows: next token
    # after 0: -1/4 * 2 * 0.5 * (e1 - e3); after 1: -1/4 * (e2 - 1/4); after 3: +1/4 * (e1 - 1/4)
    by_hand = torch.tensor([[0.0, 0.0625, 0.0, -0.0625],
                            [-0.25, 0.0625, 0.0, 0.1875],
                            [0.0, -0.1875, 0.0, -0.0625],
                            [0.25, 0.0625, 0.0, -0.0625]], dtype=F64)
    assert gap(model.lm_head.weight.grad, by_hand) < 1e-12
    optim.step()
    p = (2 * model.lm_head.weight.detach()).softmax(0)  # p[next, context]
    assert p[1, 0] > 0.25 and p[2, 1] > 0.25  # rewarded
    assert p[3, 0] < 0.25 and p[1, 3] < 0.25  # punished
    # shifted by one, the tokens would have been predicted from themselves, or from the next
    assert p[1, 1] < 0.25 and (p[:, 2] == 0.25).all() and p[0, 0] == p[2, 0]


# --- mismatch statistics -------------------------------------------------------------------------


def test_mismatch_by_hand():
    m = mismatch(torch.tensor([0.0, math.log(2), -math.log(4)]))
    # (0 + 0.693147 + 1.386294) / 3; r - 1 - ln r: 0, 1 - 0.693147, -0.75 + 1.386294
    assert m["mismatch/logp_abs_mean"] == pytest.approx(0.6931472, abs=1e-6)
    assert m["mismatch/logp_abs_max"] == pytest.approx(1.3862944, abs=1e-6)
    assert m["mismatch/kl"] == pytest.approx((0.3068528 + 0.6362944) / 3, abs=1e-6)
    # 1 % of two gaps above the lowest: -1.386294 + 0.02 * 1.386294
    assert m["mismatch/ratio_p01"] == pytest.approx(math.exp(-1.3585685), abs=1e-6)
    tail = mismatch(torch.cat((torch.zeros(980), torch.full((20,), -3.0))))
    assert tail["mismatch/ratio_p01"] == pytest.approx(math.exp(-3), abs=1e-6)
    assert tail["mismatch/ratio_p001"] == tail["mismatch/ratio_min"]
    assert tail["mismatch/ratio_min"] == pytest.approx(math.exp(-3), abs=1e-6)
    assert tail["mismatch/ratio_p05"] == 1 and tail["mismatch/outside_frac"] == 0.02
    nothing = mismatch(torch.tensor([]))
    assert nothing.keys() == m.keys() and all(math.isnan(x) for x in nothing.values())


# --- the optimiser -------------------------------------------------------------------------------


class Weights(nn.Module):
    """Parameters alone; `push(g)` is a backward pass whose gradient is g."""

    def __init__(self, *values, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=dtype))

    def push(self, *g):
        (self.w * torch.tensor(g, dtype=self.w.dtype)).sum().backward()


def test_small_updates_move_bfloat16_weights_in_the_end():
    """Near 0.01 bfloat16 steps by 2^-14 = 6.1e-5: 31 updates of 1e-6 make half of that."""
    start, ulp = 0.009765625, 2.0**-14  # 1.25 * 2^-7
    net = Weights(start, dtype=torch.bfloat16)
    optim = MasterOptimizer(net, lr=1e-6, max_grad_norm=1.0)
    control = nn.Parameter(torch.tensor([start], dtype=torch.bfloat16))
    plain = torch.optim.AdamW([control], lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, 101):
        net.push(0.5)
        optim.step()
        control.grad = torch.full_like(control, 0.5)
        plain.step()
        assert optim.masters[0].item() == pytest.approx(start - step * 1e-6, abs=5e-8)
        if step in (30, 31):
            assert net.w.item() == start - (step == 31) * ulp
    assert net.w.item() == start - 2 * ulp  # -1e-4 is 1.6 steps
    assert net.w.dtype == torch.bfloat16 and control.item() == start


def test_gradients_add_up_in_float32():
    net, control = (Weights(1.0, dtype=torch.bfloat16) for _ in range(2))
    optim = MasterOptimizer(net, lr=1e-6, max_grad_norm=1.0)
    for each in (net, control):
        each.push(1.0)
        for _ in range(256):
            each.push(2.0**-9)  # a quarter of bfloat16's step at 1
    assert net.w.grad is None and optim.masters[0].grad.dtype == torch.float32
    assert optim.masters[0].grad.item() == 1.5
    assert control.w.grad.item() == 1.0  # the control: bfloat16 rounds every one of them away
    assert optim.step() == 1.5 and optim.masters[0].grad is None


def test_masters_of_a_model_with_tied_weights():
    model = tiny_model(torch.bfloat16)
    optim = MasterOptimizer(model, lr=1e-3, max_grad_norm=1.0)
    assert len(optim.masters) == len(list(model.parameters()))
    before = flat(model.parameters()).clone()
    backward(model, sampled(model), REWARDS.float(), Objective())
    assert all(p.grad is None for p in model.parameters())
    optim.step()
    after = flat(model.parameters())
    assert (after != before).float().mean() > 0.05
    assert torch.equal(after, flat(optim.masters).bfloat16())
    wide = tiny_model(torch.float32)
    assert all(a is b for a, b in zip(MasterOptimizer(wide, lr=1e-3, max_grad_norm=1.0).masters,
                                      wide.parameters(), strict=True))
    wide.norm.weight.requires_grad_(False)
    masters = MasterOptimizer(wide, lr=1, max_grad_norm=1).masters
    assert not any(p is wide.norm.weight for p in masters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_clipping_and_the_first_update_by_hand(dtype):
    net = Weights(2.0, 4.0, 1.0, dtype=dtype)
    optim = MasterOptimizer(net, lr=0.5, max_grad_norm=1.0)
    net.push(3.0, -4.0, 0.0)
    assert optim.step() == pytest.approx(5.0, rel=1e-6)  # before clipping to (0.6, -0.8, 0)
    state = optim.optimizer.state[optim.masters[0]]
    assert state["exp_avg"].tolist() == pytest.approx([0.06, -0.08, 0.0], abs=1e-6)
    assert state["exp_avg_sq"].tolist() == pytest.approx([0.018, 0.032, 0.0], abs=1e-6)
    # the first step of Adam is lr * sign; no gradient, no move: no weight decay
    assert net.w.tolist() == pytest.approx([1.5, 4.5, 1.0], abs=1e-6)
    net.push(0.3, 0.0, 0.0)
    assert optim.step() == pytest.approx(0.3, rel=4e-3)  # 0.3 in bfloat16 is 0.30078
    # 0.9 * 0.06 + 0.1 * 0.3: not clipped, not scaled up
    assert state["exp_avg"].tolist() == pytest.approx([0.084, -0.072, 0.0], abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sgd_by_hand(dtype):
    net = nn.Module()
    net.w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype))
    optim = MasterOptimizer(net, lr=0.25, max_grad_norm=1.0, kind="sgd")
    for _ in range(2):
        (net.w * torch.tensor([3.0, 4.0], dtype=dtype)).sum().backward()
        assert optim.step() == pytest.approx(5.0)  # clipped to [0.6, 0.8]
    assert gap(optim.masters[0], torch.tensor([1 - 0.5 * 0.6, -2 - 0.5 * 0.8])) < 1e-6
    assert not optim.optimizer.state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad, finite", [(math.nan, True), (math.inf, True), (1.0, False)])
def test_a_step_that_is_not_finite_changes_nothing(dtype, bad, finite):
    nets = [Weights(1.0, -2.0, dtype=dtype) for _ in range(2)]
    optims = [MasterOptimizer(net, lr=0.1, max_grad_norm=1.0) for net in nets]
    for step in range(4):
        if step == 2:  # the first alone has a bad step in between
            nets[0].push(bad, 0.5)
            norm = optims[0].step(finite=finite)
            assert finite != math.isfinite(norm)
        for net, optim in zip(nets, optims, strict=True):
            assert net.w.grad is None and optim.masters[0].grad is None
            net.push(0.25, 0.5 - step)
            assert math.isfinite(optim.step())
        assert torch.equal(optims[0].masters[0], optims[1].masters[0])
        assert torch.equal(nets[0].w, nets[1].w)
        a, b = (o.optimizer.state[o.masters[0]] for o in optims)
        assert all(torch.equal(a[key], b[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_saved_state_continues_bit_for_bit(dtype):
    def steps(net, optim, first, last):
        for step in range(first, last):
            net.push(*(math.sin(step + x) for x in range(3)))
            optim.step()

    whole = Weights(0.01, -0.5, 3.0, dtype=dtype)
    optim = MasterOptimizer(whole, lr=1e-4, max_grad_norm=0.5)
    steps(whole, optim, 0, 8)
    file = io.BytesIO()
    torch.save({"net": whole.state_dict(), "optim": optim.state_dict()}, file)
    steps(whole, optim, 8, 40)

    def resumed(*drop):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        net = Weights(0.0, 0.0, 0.0, dtype=dtype)
        net.load_state_dict(saved["net"])
        again = MasterOptimizer(net, lr=1e-4, max_grad_norm=0.5)
        new = again.state_dict()
        again.load_state_dict({k: new[k] if k in drop else v for k, v in saved["optim"].items()})
        steps(net, again, 8, 40)
        return net.w, again.masters[0]

    w, master = resumed()
    assert torch.equal(w, whole.w) and torch.equal(master, optim.masters[0])
    # Controls: without the moments, or from rounded masters, it goes elsewhere.
    assert not torch.equal(resumed("optimizer")[1], master)
    assert torch.equal(resumed("masters")[1], master) == (dtype == torch.float32)
