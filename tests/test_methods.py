"""The four methods: where they are the same, what Sparse-RL corrects, what abstains."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_grpo import F64, REWARDS, sampled, tiny_model

import grpo
import train
from config import parse
from errors import BadInput
from eval import load, load_problems
from eviction import DENSE, NEVER
from grpo import METHODS, Objective, advantages, backward, dead_groups, old_policy, sparse_rl
from optim import MasterOptimizer

NAN = math.nan


def gradient(model, rollout, objective, updates=1):
    model.zero_grad()
    old = old_policy(model, rollout, objective, updates)
    metrics = backward(model, rollout, REWARDS, objective, old)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), metrics


@pytest.mark.parametrize("updates", [1, 2])
def test_nothing_evicted_makes_the_methods_one(updates):
    """Three steps in float32, `updates` on the same samples: the same parameters to 1e-6."""
    ends = {}
    for method in METHODS:
        for lam in (0.0, 0.7) if method == "smd" else (0.0,):
            model = tiny_model(torch.float32)
            optim = MasterOptimizer(model, lr=1e-3, max_grad_norm=1.0)
            o = Objective(method=method, lam=lam)
            for step in range(3):
                rollout = sampled(model, DENSE, step=step)
                old = old_policy(model, rollout, o, updates)
                for _ in range(updates):
                    metrics = backward(model, rollout, REWARDS, o, old)
                    optim.step(finite=True)
                assert metrics["mismatch/rejected_frac"] == 0
            ends[method, lam] = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = next(iter(ends.values()))
    start = torch.cat([p.detach().flatten() for p in tiny_model(torch.float32).parameters()])
    assert (first - start).abs().max() > 1e-3
    for end in ends.values():
        assert (end - first).abs().max() < 1e-6


def test_evicting_separates_them():
    model = tiny_model()
    rollout = sampled(model)
    found = {m: gradient(model, rollout, Objective(method=m, lam=0.0)) for m in METHODS}
    for a in METHODS:
        for b in METHODS:
            # `dense` differs from `naive` by its sampler alone
            same = a == b or {a, b} == {"dense", "naive"}
            assert torch.equal(found[a][0], found[b][0]) == same, (a, b)
    assert found["smd"][1]["mismatch/logp_abs_max"] < 1e-9
    assert found["naive"][1]["mismatch/logp_abs_max"] > 1e-2


def test_ratios_are_against_the_recorded_or_the_old_dense_policy():
    model = tiny_model()
    rollout = sampled(model)
    assert old_policy(model, rollout, Objective(method="smd"), 2) is rollout.logp
    assert old_policy(model, rollout, Objective(method="smd"), 1) is None
    assert old_policy(model, rollout, Objective(method="naive"), 1) is None
    old = old_policy(model, rollout, Objective(method="naive", micro_samples=3), 2)
    differences = []
    for n in range(3):
        logp, *_, mask = grpo.group_terms(model, rollout, n, slice(0, 4), temperature=1.0,
                                          distil=False, replay=False)
        assert (old[n, :, : mask.shape[1]][mask] - logp).abs().max() < 1e-12
        differences.append((logp - rollout.logp[n, :, : mask.shape[1]][mask]).abs().max())
    assert max(differences) > 1e-2 and not old.requires_grad
    moved = copy.deepcopy(model)
    for p in moved.parameters():
        p.data *= 1.01
    first = gradient(moved, rollout, Objective(method="smd", lam=0.0))[0]
    moved.zero_grad()
    narrow = Objective(method="smd", lam=0.0, eps_low=0.01, eps_high=0.01)
    metrics = backward(moved, rollout, REWARDS, narrow, rollout.logp)
    second = torch.cat([p.grad.flatten() for p in moved.parameters()])
    assert not torch.allclose(first, second) and metrics["policy/clip_frac"] > 0


def by_hand():
    """2 prompts x 2 samples x 2 tokens with known log-probs of the sampler."""
    rollout = sampled(tiny_model())
    logp = torch.log(torch.tensor([[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]], dtype=F64))
    return replace(rollout, tokens=rollout.tokens[:2, :2, :2], logp=logp,
                   lengths=torch.tensor([[2, 2], [1, 2]]), stopped=rollout.stopped[:2, :2],
                   prompts=rollout.prompts[:2], evict_at=rollout.evict_at[:2])


def test_sparse_rl_by_hand():
    old = torch.log(torch.tensor([[[0.25, 0.9], [0.5, 4e-5]], [[0.6, 1e-9], [5.1e-5, 0.5]]],
                                 dtype=F64))
    weight, rejected = sparse_rl(old, by_hand())
    # rho: 0.5, 1.8 -> 1.5;  1, 8e-5 (rejected);  1.2, not sampled;  1.02e-4 (just stays), 1
    expected = torch.tensor([[[0.5, 1.5], [1.0, 8e-5]], [[1.2, 1.0], [1.02e-4, 1.0]]], dtype=F64)
    assert torch.allclose(weight, expected, rtol=1e-12, atol=0)
    assert rejected.tolist() == [[False, True], [False, False]]


def test_a_rejected_sample_leaves_numerator_and_denominator(monkeypatch):
    """As if it had sampled nothing; the advantages are those with it."""
    model = tiny_model()
    rollout = sampled(model)
    o = Objective(method="sparse-rl")
    old = old_policy(model, rollout, o)
    old[0, 1, 0] = rollout.logp[0, 1, 0] + math.log(0.9e-4)
    model.zero_grad()
    metrics = backward(model, rollout, REWARDS, o, old)
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert metrics["mismatch/rejected_frac"] == pytest.approx(1 / 12)
    lengths = rollout.lengths.clone()
    lengths[0, 1] = 0
    without = replace(rollout, lengths=lengths)
    model.zero_grad()
    backward(model, without, REWARDS, o, old)
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (got - want).abs().max() < 1e-12
    monkeypatch.setattr(grpo, "MIN_RHO", 0.0)  # the control: not rejected
    model.zero_grad()
    backward(model, rollout, REWARDS, o, old)
    kept = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (kept - want).abs().max() > 1e-3 * want.abs().max()


@pytest.mark.parametrize("loss", grpo.LOSSES)
def test_left_out_is_out_of_every_denominator(loss):
    """Rejected or abstaining: the gradient is that of the step without the sample."""
    model = tiny_model()
    rollout = sampled(model)
    some = replace(rollout, tokens=rollout.tokens[:, :3], lengths=rollout.lengths[:, :3],
                   stopped=rollout.stopped[:, :3], logp=rollout.logp[:, :3],
                   evict_at=[x[:, :3] for x in rollout.evict_at])
    rewards = torch.tensor([[1.0, 0.0, 0.5, NAN]]).expand(3, 4)
    found = []
    for r, w in ((rollout, rewards), (some, rewards[:, :3])):
        model.zero_grad()
        backward(model, r, w, Objective(loss=loss, lam=0.0))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (found[0] - found[1]).abs().max() < 1e-12 and found[0].abs().max() > 1e-3
    mask = torch.ones(2, 2, 3, dtype=torch.bool)
    mask[0, 1] = False
    weights = grpo.token_weights(mask, loss)
    assert weights.sum() == pytest.approx(1.0) and not weights[0, 1].any()


def test_a_step_whose_samples_are_all_rejected_moves_nothing(monkeypatch):
    model = tiny_model()
    optim, rollout = MasterOptimizer(model, lr=1e-3, max_grad_norm=1.0), sampled(model)
    o = Objective(method="sparse-rl")
    backward(model, rollout, REWARDS, o, old_policy(model, rollout, o))
    optim.step(finite=True)  # momentum
    for all_out in (True, False):
        monkeypatch.setattr(grpo, "MIN_RHO", 1e9 if all_out else 0.0)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        metrics = backward(model, rollout, REWARDS, o, old_policy(model, rollout, o))
        optim.step(finite=True)
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert torch.equal(before, after) == all_out
        assert metrics["mismatch/rejected_frac"] == all_out and metrics["mismatch/kl"] > 0


def test_a_nan_reward_abstains():
    rewards = torch.tensor([[1.0, NAN, 0.0, 0.5], [NAN, 0.3, 0.3, NAN], [NAN] * 4, [2.0, 1, 1, 0]])
    a = advantages(rewards, scale=True)
    three = torch.tensor([[1.0, 0.0, 0.5]])
    assert torch.allclose(a[0, [0, 2, 3]], (three - 0.5)[0] / (0.5 + 1e-6)) and a[0, 1] == 0
    assert (a[1:3] == 0).all() and dead_groups(rewards).tolist() == [False, True, True, False]
    assert torch.allclose(a[3], advantages(rewards[3:], scale=True)[0])


def test_a_distillation_weight_belongs_to_smd():
    with pytest.raises(BadInput, match="--lam 0.1: --method naive distils nothing"):
        parse(["--task", "gsm8k", "--method", "naive", "--lam", "0.1"], "x")
    with pytest.raises(BadInput, match="--teacher self: --method dense distils nothing"):
        parse(["--task", "gsm8k", "--method", "dense", "--teacher", "self"], "x")
    assert parse(["--task", "gsm8k"], "x").lam == 0.1
    assert parse(["--task", "gsm8k"], "x").teacher == grpo.TEACHERS[0]
    assert parse(["--task", "gsm8k", "--method", "naive"], "x").teacher is None
    assert parse(["--task", "gsm8k", "--lam", "0", "--teacher", "self"], "x").teacher is None
    assert parse(["--task", "gsm8k", "--method", "dense"], "x").objective().method == "dense"
    with pytest.raises(BadInput, match="--updates-per-rollout 0"):
        parse(["--task", "gsm8k", "--updates-per-rollout", "0"], "x")


@pytest.mark.parametrize("method,updates", [("smd", 1), ("smd", 3), ("dense", 1), ("naive", 2),
                                            ("sparse-rl", 1)])
def test_a_training_step_follows_the_flags(method, updates, tmp_path, monkeypatch):
    """The sampler's cache, the number of updates, and what the ratios are taken against."""
    seen, once = [], train.backward

    def spy(model, rollout, rewards, objective, old_logp, teacher):
        seen.append((rollout, objective.method, old_logp))
        return once(model, rollout, rewards, objective, old_logp, teacher)

    monkeypatch.setattr(train, "backward", spy)
    train.run(parse(["--task", "gsm8k", "--method", method, "--updates-per-rollout", str(updates),
                     "--steps", "1", "--prompts", "1", "--group", "3", "--max-new", "8",
                     "--limit", "0", "--eval-every", "0", "--no-control", "--save-every", "0",
                     "--out", str(tmp_path / "run")], "x"))
    assert len(seen) == updates and {x[1] for x in seen} == {method}
    rollout, _, old = seen[0]
    evicted = any((x != NEVER).any() for x in rollout.evict_at)
    assert evicted == (method != "dense")
    assert all(x[0] is rollout and x[2] is old for x in seen), "the same samples, the same policy"
    if updates == 1 and method != "sparse-rl":
        assert old is None
    else:
        assert (old is rollout.logp) == (method == "smd")


def test_metrics_of_several_updates(monkeypatch):
    """Of the first, whose policy is the sampler's; the clip that of the last."""
    updates = iter(range(1, 4))
    monkeypatch.setattr(train, "backward", lambda *a: {
        "loss": (u := float(next(updates))), "mismatch/kl": u, "policy/clip_frac": u,
        "tok/learn": u})
    cfg = parse(["--task", "gsm8k", "--updates-per-rollout", "3", "--prompts", "1", "--group", "2",
                 "--max-new", "2", "--method", "naive"], "x")
    tok, model = load(cfg)
    batch = load_problems(cfg, "train", tok)[:1]
    optim = SimpleNamespace(step=lambda finite: 7.0)
    metrics, _ = train.train_step(model, optim, tok, batch, cfg, 0)
    assert (metrics["loss"], metrics["mismatch/kl"], metrics["policy/clip_frac"]) == (1, 1, 3)
    assert metrics["tok/learn_per_sec"] * metrics["time/learn_sec"] == pytest.approx(6)
