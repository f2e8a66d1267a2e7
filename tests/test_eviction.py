"""eviction.py: what `evict` keeps and records, and what each policy's score means."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import eviction
from errors import BadInput
from eviction import NEVER, POLICIES, Eviction, Seen, evict, random, recent, snapkv
from kvcache import KVCache
from model import ModelConfig, Qwen, causal

KEEPS = (0.01, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
SHAPES = ((4, 32), (4, 8), (0, 1), (1, 1), (0, 16), (10, 3))  # sinks, window


def slow_evict(score, pos, evict_at, *, t, budget, sinks, window):
    """`evict`, one row and head at a time, by sorting. Returns the new pos and evict_at."""
    pos, evict_at = pos.clone(), evict_at.clone()
    for b in range(pos.shape[0]):
        for h in range(pos.shape[1]):

            def rank(slot, b=b, h=h):
                p, s = pos[b, h, slot].item(), score[b, h, slot].item()
                s = -math.inf if math.isnan(s) else s  # no number is worse
                return (p < sinks or p > t - window, s, p)

            live = [slot for slot in range(pos.shape[2]) if pos[b, h, slot] >= 0]
            for slot in sorted(live, key=rank, reverse=True)[budget:]:
                evict_at[b, h, pos[b, h, slot]] = t + 1
                pos[b, h, slot] = -1
    return pos, evict_at


def one(scores, *, budget, sinks=0, window=1, positions=None, dtype=torch.float32):
    """The positions that stay of one head."""
    n = len(scores)
    pos = torch.tensor(positions or range(n)).view(1, 1, n)
    t = int(pos.max())
    record = torch.full((1, 1, t + 2), NEVER, dtype=torch.int32)
    evict(torch.tensor(scores, dtype=dtype).view(1, 1, n), pos, record, t=t, budget=budget,
          sinks=sinks, window=window)
    live = sorted(pos[pos >= 0].tolist())
    gone = (record[0, 0] != NEVER).nonzero()[:, 0].tolist()
    assert all(record[0, 0, gone] == t + 1)
    assert sorted(live + gone) == sorted(p for p in (positions or range(n)) if p >= 0)
    return live


# ---- how many -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks,window", SHAPES)
@pytest.mark.parametrize("keep", KEEPS)
def test_budget_is_exact(keep, sinks, window):
    e = Eviction("recent", keep, sinks=sinks, window=window)
    for P in range(1, 301):
        share = Fraction(str(keep)) * P  # exact, as the user wrote it
        nearest = math.floor(share + Fraction(1, 2))
        assert e.budget(P) == min(P, max(nearest, sinks + window))
        assert min(P, sinks + window) <= e.budget(P) <= P
        assert e.budget(P) == P or (P > sinks + window and keep < 1)


@pytest.mark.parametrize("sinks,window", SHAPES)
@pytest.mark.parametrize("keep", [0.1, 0.3, 0.5, 0.9, 1.0])
def test_evict_keeps_the_budget_the_sinks_and_the_window(keep, sinks, window):
    e = Eviction("random", keep, sinks=sinks, window=window)
    draw = torch.Generator().manual_seed(0)
    for P in range(1, 301):
        pos = torch.arange(P).repeat(1, 3, 1)
        record = torch.full((1, 3, P + 2), NEVER, dtype=torch.int32)
        evict(torch.randn(1, 3, P, generator=draw), pos, record, t=P - 1, budget=e.budget(P),
              sinks=sinks, window=window)
        live = pos >= 0
        assert (live.sum(-1) == e.budget(P)).all()
        assert live[..., :sinks].all() and live[..., max(P - window, 0) :].all()
        assert torch.equal(record[..., :P] == NEVER, live)
        assert (record[..., :P][~live] == P).all() and (record[..., P:] == NEVER).all()
        if P <= sinks + window:
            assert live.all()


# ---- which ones ---------------------------------------------------------------------------------


def test_ties_go_to_the_newer():
    assert one([1.0] * 9, budget=4) == [5, 6, 7, 8]
    assert one([1.0] * 9, budget=4, sinks=2) == [0, 1, 7, 8]
    assert one([1.0] * 5, budget=2, positions=[9, 2, 30, 4, 17]) == [17, 30]  # not newer slots


def test_order_of_special_values():
    inf, nan = math.inf, math.nan
    values = [inf, 1e30, 1.0, 1e-40, 0.0, -1e-40, -1.0, -1e30, -inf]
    for n in range(1, len(values) + 1):  # the last position is the window, whatever its score
        assert one([*values, nan], budget=n + 1) == [*range(n), 9]
        assert one([nan, *values[::-1], nan], budget=n + 1) == [*range(10 - n, 11)]
    assert one([nan, -1e38, nan, 2.0, 0.0], budget=3) == [1, 3, 4]
    assert one([-nan, -1e38, nan, 2.0, 0.0], budget=3) == [1, 3, 4]
    assert one([0.0, -0.0, 0.0, -0.0, 5.0], budget=3) == [2, 3, 4], "-0.0 equals 0.0"
    assert one([-0.0, 0.0, -0.0, 0.0, 5.0], budget=3) == [2, 3, 4]


def test_no_score_beats_the_protected():
    assert one([-math.inf, math.nan] + [math.inf] * 6 + [math.nan, -math.inf], budget=5, sinks=2,
               window=2) == [0, 1, 7, 8, 9]
    assert one([3e38] * 6 + [-3e38] * 2, budget=3, window=2) == [5, 6, 7]


def test_bfloat16_scores():
    """256 + 1 is 256 in bfloat16: protection must not be an addition."""
    score = [0.0, 256.0, 256.0, 257.0, 255.0, 1.0, 0.0]  # 257 is rounded to 256
    assert one(score, budget=4, sinks=1, window=1, dtype=torch.bfloat16) == [0, 2, 3, 6]
    assert one(score, budget=3, sinks=1, window=1) == [0, 3, 6]


def test_neighbouring_float32_scores_differ():
    up = [1 + 2**-23 * i for i in (3, 2, 1, 0)]
    assert one([*up, 0.0], budget=3) == [0, 1, 4]
    assert one([*(-x for x in up[::-1]), 0.0], budget=3) == [0, 1, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evict_is_the_slow_sort(dtype):
    """Rows of any slot order, with free slots, ties, special values and an earlier record."""
    draw = torch.Generator().manual_seed(1)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0])
    for case in range(150):
        B, Hkv, S, T = 2, 3, 24, 40
        t = 30 + case % 5
        pos = torch.rand(B, Hkv, t + 1, generator=draw).argsort(-1)[..., :S].contiguous()
        pos[torch.rand(pos.shape, generator=draw) < 0.3] = -1
        score = torch.randn(B, Hkv, S, generator=draw).mul(2).round().div(2)
        some = torch.rand(score.shape, generator=draw) < 0.4
        score[some] = special[torch.randint(0, 7, (int(some.sum()),), generator=draw)]
        record = torch.full((B, Hkv, T), NEVER, dtype=torch.int32)
        early = torch.rand(record.shape, generator=draw) < 0.3
        early.scatter_(-1, pos.clamp(min=0), False)  # live keys were not evicted before
        record[early] = 7
        options = {"t": t, "budget": 5 + case % 20, "sinks": case % 3, "window": 1 + case % 2}
        want = slow_evict(score.to(dtype), pos, record, **options)
        evict(score.to(dtype), pos, record, **options)
        assert torch.equal(pos, want[0]) and torch.equal(record, want[1])


def test_free_slots_never_count_and_are_never_recorded():
    pos = torch.tensor([[[-1, 3, -1, 0, 5, -1, 4]]])
    record = torch.full((1, 1, 8), NEVER, dtype=torch.int32)
    score = torch.tensor([[[9.0, 1.0, math.inf, 2.0, 0.0, math.nan, 3.0]]])
    evict(score, pos, record, t=5, budget=3, sinks=0, window=1)
    assert pos.tolist() == [[[-1, -1, -1, 0, 5, -1, 4]]]
    assert record[0, 0].tolist() == [NEVER] * 3 + [6] + [NEVER] * 4
    before = pos.clone(), record.clone()
    evict(score, pos, record, t=6, budget=3, sinks=0, window=1)  # at the budget: nothing happens
    evict(score, pos, record, t=6, budget=99, sinks=0, window=1)
    assert torch.equal(pos, before[0]) and torch.equal(record, before[1])


def test_the_record_is_written_once():
    pos = torch.arange(6).view(1, 1, 6)
    record = torch.full((1, 1, 9), NEVER, dtype=torch.int32)
    score = torch.tensor([[[0.0, 5.0, 1.0, 4.0, 3.0, 9.0]]])
    evict(score, pos, record, t=5, budget=4, sinks=0, window=1)
    assert record[0, 0].tolist() == [6, NEVER, 6, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER]
    pos[0, 0, 0], pos[0, 0, 2] = 6, 7  # the freed slots are used again
    evict(score, pos, record, t=7, budget=3, sinks=0, window=1)
    assert record[0, 0].tolist() == [6, NEVER, 6, 8, 8, NEVER, 8, NEVER, NEVER]
    assert pos.tolist() == [[[-1, 1, 7, -1, -1, 5]]]


# ---- snapkv -------------------------------------------------------------------------------------


def random_seen(Hq=6, Hkv=2, P=45, W=8, D=16, B=2) -> Seen:
    draw = torch.Generator().manual_seed(2)
    q = 2 * torch.randn(B, Hq, W, D, generator=draw)
    k = torch.randn(B, Hkv, P, D, generator=draw)
    return Seen(q, k, torch.arange(P).expand(B, Hkv, P).clone(), layer=1, seed=0, sequence=0)


def slow_snapkv(attention: np.ndarray, W: int) -> np.ndarray:
    """Votes, pooled, of probabilities (Hq, W, P) of the query heads of one KV head."""
    heads, _, P = attention.shape
    votes = [sum(attention[h, w, j] for h in range(heads) for w in range(W)) / (heads * W)
             if j < P - W else 0.0 for j in range(P)]
    return np.array([max(votes[max(j - 3, 0) : j + 4]) for j in range(P)])


@pytest.mark.parametrize("Hq,Hkv", [(2, 2), (4, 2), (14, 2), (3, 1)])
def test_snapkv_is_the_formula(Hq, Hkv):
    seen = random_seen(Hq, Hkv)
    B, _, W, D = seen.q.shape
    P, groups = seen.k.shape[2], Hq // Hkv
    got = snapkv(seen)
    assert got.dtype == torch.float32 and got.shape == (B, Hkv, P)
    for b in range(B):
        for h in range(Hkv):
            attention = np.zeros((groups, W, P))
            for g in range(groups):
                for w in range(W):
                    n = P - W + w + 1  # keys that this query may see
                    q = seen.q[b, h * groups + g, w].double().numpy()
                    z = seen.k[b, h, :n].double().numpy() @ q / math.sqrt(D)
                    attention[g, w, :n] = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            want = slow_snapkv(attention, W)
            assert np.abs(got[b, h].numpy() - want).max() < 1e-6
            assert want.max() > 1.5 / P, "the scores should say something"


def test_snapkv_window_does_not_lift_its_neighbours():
    seen = random_seen()
    seen.k[:, :, -8:] *= 20  # nearly all attention stays in the window
    assert (snapkv(seen)[..., -4:] == 0).all()
    assert snapkv(seen)[..., 30:37].max() < 0.2
    # The sinks keep their score at the border of the pooling.
    seen = random_seen()
    seen.k[:, :, 0] = 20 * seen.q[:, ::3].mean(2)
    assert (snapkv(seen).argmax(-1) <= 3).all()


def make_model(seed=0) -> Qwen:
    hf = {"model_type": "qwen3", "vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
          "intermediate_size": 48, "rms_norm_eps": 1e-6, "rope_theta": 100.0}
    model = Qwen(ModelConfig.from_hf(hf))
    draw = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=draw)
        p.data = noise / p.shape[-1] ** 0.5 if p.ndim == 2 else 1 + 0.3 * noise
        if "q_norm" in name or "k_norm" in name:
            p.data *= 2
    return model


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.float64, 1e-5)])
def test_snapkv_scores_are_the_models_attention(dtype, bound, monkeypatch):
    """The probabilities are read off the model: attention to values that are the identity."""
    model, P, W, scores, votes, bare = make_model().to(dtype), 60, 8, [], [], []
    monkeypatch.setitem(POLICIES, "snapkv", lambda seen: scores.append(snapkv(seen)) or scores[-1])
    ids, pos = torch.arange(P)[None] * 7 % 30, torch.arange(P)[None]
    cache = KVCache(model.cfg, [P], 1, 1, sequence=[0], eviction=Eviction("snapkv", 0.5, window=W), dtype=dtype)
    inside = cache.prefill(0, 0)

    def attend(layer, q, k, v):
        eye = torch.eye(P, dtype=dtype).expand(1, 2, P, P)
        gain = model.layers[layer].self_attn.q_norm.weight.mean()
        for found, x in ((votes, q), (bare, q / gain)):
            attention = causal(layer, x, k, eye)[0, :, -W:].double().numpy()  # (Hq, W, P)
            found.append([slow_snapkv(attention[2 * h : 2 * h + 2], W) for h in range(2)])
        return inside(layer, q, k, v)

    with torch.no_grad():
        model(ids, pos, attend)
    assert len(scores) == 3
    got = torch.cat(scores).numpy()
    assert np.abs(got - np.array(votes)).max() < bound
    assert np.abs(got - np.array(bare)).max() > 1e-2, "the control: queries with another gain"
    assert got.max() > 5 / P, "attention far from uniform"


def test_policies_see_the_window_and_every_key(monkeypatch):
    """What `prefill` shows a policy: the last W queries, all P keys, and who is asking."""
    shown = []
    monkeypatch.setitem(POLICIES, "recent", lambda seen: shown.append(seen) or recent(seen))
    model, P = make_model(), 30
    cache = KVCache(model.cfg, [3, P], 1, 1, eviction=Eviction("recent", 0.1, window=9, seed=5),
                    dtype=torch.float32)
    with torch.no_grad():
        for n, length in enumerate((3, P)):
            pos = torch.arange(length)[None]
            model(pos, pos, cache.prefill(n, 40 + n))
    assert [s.layer for s in shown] == [0, 1, 2], "a prompt within budget asks no policy"
    for s in shown:
        assert s.q.shape == (1, 4, 9, 16) and s.k.shape == (1, 2, P, 16)
        assert (s.seed, s.sequence) == (5, 41)


# ---- recent, random -----------------------------------------------------------------------------


def test_recent_is_sinks_and_newest():
    seen = random_seen(P=100)
    pos = seen.pos.clone()
    record = torch.full(pos.shape, NEVER, dtype=torch.int32)
    evict(recent(seen), pos, record, t=99, budget=30, sinks=4, window=8)
    assert pos[1, 1][pos[1, 1] >= 0].tolist() == [*range(4), *range(74, 100)]


def priorities(P=64, *, layer=0, sequence=0, seed=0, heads=2, positions=None) -> torch.Tensor:
    pos = torch.tensor(positions) if positions else torch.arange(P)
    empty = torch.zeros(1, heads, len(pos), 2)
    return random(Seen(empty, empty, pos.expand(1, heads, -1), layer, seed, sequence))[0]


def test_random_differs_by_layer_head_sequence_and_seed():
    draws = [priorities()[0], priorities()[1], priorities(layer=1)[0], priorities(sequence=1)[0],
             priorities(seed=1)[0], priorities(layer=1)[1], priorities(sequence=1, seed=1)[0]]
    kept = torch.stack([x.argsort().argsort() >= 32 for x in draws]).double()
    together = kept @ kept.T  # 16 +- 2.8 for independent halves of 64
    off = together[~torch.eye(len(draws), dtype=torch.bool)]
    assert (together.diagonal() == 32).all() and 5 < off.min() and off.max() < 27
    assert torch.equal(priorities(), priorities()), "and is a function of these alone"


def test_random_is_one_lifelong_priority():
    """A key's score depends on its position alone, not on its slot or on the other keys."""
    full = priorities(50, layer=2, sequence=9)
    some = [31, 2, 17, 49, 0]
    assert torch.equal(priorities(positions=some, layer=2, sequence=9), full[:, some])
    wide = priorities(50, layer=2, sequence=9, heads=5)
    assert torch.equal(wide[:2], full)


def test_random_is_uniform_over_positions():
    P, sinks, window, budget, n = 80, 4, 8, 40, 600
    count = torch.zeros(P)
    for sequence in range(n):
        pos = torch.arange(P).repeat(1, 2, 1)
        record = torch.full((1, 2, P), NEVER, dtype=torch.int32)
        evict(priorities(P, sequence=sequence)[None], pos, record, t=P - 1, budget=budget,
              sinks=sinks, window=window)
        count += (pos[0] >= 0).sum(0)
    assert (count[:sinks] == 2 * n).all() and (count[-window:] == 2 * n).all()
    rest, m = count[sinks:-window], P - sinks - window
    share = (budget - sinks - window) / m
    # The counts of m keys sum to a constant: variance n share (1 - share) m / (m - 1) a key.
    chi2 = ((rest - 2 * n * share) ** 2).sum() / (2 * n * share * (1 - share)) * (m - 1) / m
    assert abs(chi2 - (m - 1)) < 4 * (2 * (m - 1)) ** 0.5, chi2


def test_random_scores_are_distinct_and_exact():
    score = priorities(4096)[0]
    assert score.dtype == torch.float32 and len(score.unique()) > 4090
    assert torch.equal(score, score.round()) and score.abs().max() <= 2**23


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options,says", [
    ({"keep": 0}, "--keep 0: expected a share in (0, 1]"),
    ({"keep": -0.5}, "--keep -0.5: expected a share in (0, 1]"),
    ({"keep": 1.5}, "--keep 1.5: expected a share in (0, 1]"),
    ({"keep": math.nan}, "--keep nan: expected a share in (0, 1]"),
    ({"keep": math.inf}, "--keep inf: expected a share in (0, 1]"),
    ({"policy": "h20"}, "--policy h20: unknown; expected one of snapkv, recent, random"),
    ({"sinks": -1}, "--sinks -1 --window 32: expected >= 0 and >= 1"),
    ({"window": 0}, "--sinks 4 --window 0: expected >= 0 and >= 1"),
])
def test_bad_input_is_one_line(options, says):
    with pytest.raises(BadInput) as e:
        Eviction(**options)
    assert str(e.value).startswith(says) and "\n" not in str(e.value)


def test_defaults():
    e = Eviction()
    assert (e.policy, e.keep, e.sinks, e.window, e.seed) == ("snapkv", 0.5, 4, 32, 0)
    assert eviction.DENSE.budget(1000) == 1000
    assert e.budget(36) == 36 and e.budget(37) == 36 and e.budget(1000) == 500
