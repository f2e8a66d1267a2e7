"""eviction.py: what `evict` keeps and records, what each policy's score means, and the schedules.

The slow references go key by key in numpy, float64 and plain loops, from the formulas of the
papers. Controls show that a comparison can fail.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eviction
from config import parse
from errors import BadInput
from eviction import NEVER, POLICIES, Eviction, Seen, evict, random, rkv, snapkv
from kvcache import KVCache, Slots
from model import ModelConfig, Qwen, causal

KEEPS = (0.01, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
SHAPES = ((4, 32), (4, 8), (0, 1), (1, 1), (0, 16), (10, 3))  # sinks, window
NAMES = ("snapkv", "h2o", "recent", "random", "tova", "rkv", "knorm", "keydiff")
inf, nan = math.inf, math.nan


def slow_evict(score, pos, evict_at, *, t, budget, sinks, recent, rows=None):
    """`evict`, one row and head at a time, by sorting. Returns the new pos and evict_at."""
    pos, evict_at = pos.clone(), evict_at.clone()
    for b in range(pos.shape[0]):
        for h in range(pos.shape[1]):

            def rank(slot, b=b, h=h):
                p, s = pos[b, h, slot].item(), score[b, h, slot].item()
                s = -inf if math.isnan(s) else s  # no number is worse
                return (p < sinks or p > t - recent, s, p)

            live = [slot for slot in range(pos.shape[2]) if pos[b, h, slot] >= 0]
            for slot in sorted(live, key=rank, reverse=True)[budget:]:
                if rows is None or rows[b]:
                    evict_at[b, h, pos[b, h, slot]] = t + 1
                    pos[b, h, slot] = -1
    return pos, evict_at


def one(scores, *, budget, sinks=0, recent=1, positions=None, dtype=torch.float32):
    """The positions that stay of one head."""
    n = len(scores)
    pos = torch.tensor(positions or range(n)).view(1, 1, n)
    t = int(pos.max())
    record = torch.full((1, 1, t + 2), NEVER, dtype=torch.int32)
    evict(torch.tensor(scores, dtype=dtype).view(1, 1, n), pos, record, t=t, budget=budget,
          sinks=sinks, recent=recent)
    live = sorted(pos[pos >= 0].tolist())
    gone = (record[0, 0] != NEVER).nonzero()[:, 0].tolist()
    assert all(record[0, 0, gone] == t + 1)
    assert sorted(live + gone) == sorted(p for p in (positions or range(n)) if p >= 0)
    return live


# ---- how many -----------------------------------------------------------------------------------


def slow_votes(policy, window, decoding=False):
    W = {"snapkv": window, "rkv": min(8, window), "tova": 1}.get(policy, 0)
    return min(W, 8) if decoding else W


def slow_floor(policy, sinks, recent, window):
    if recent is None:  # h2o's share of the newest grows with the budget
        recent = 1 if policy == "h2o" else window
    return sinks + max(recent, slow_votes(policy, window))


def slow_kept(keep, P, floor):
    share = Fraction(str(keep)) * P  # exact, as the user wrote it
    return min(P, max(math.floor(share + Fraction(1, 2)), floor))


def slow_pyramid(mean, most, floor, L):
    """A line that is as steep as `most` and `floor` allow, 3/2 to 1/2 of the mean at the most."""
    if L == 1:
        return [mean]
    tip = max(0, min(mean // 2, most - mean, mean - floor))
    line = [Fraction(tip * (L - 1 - 2 * layer), L - 1) for layer in range(L)]
    return [mean + math.copysign(1, x) * math.floor(abs(x)) for x in line]


@pytest.mark.parametrize("sinks,window", SHAPES)
@pytest.mark.parametrize("keep", KEEPS)
def test_keep_is_exact(keep, sinks, window):
    e = Eviction("recent", keep, sinks=sinks, window=window)
    for P in range(1, 301):
        stays = e.stays(P)
        assert isinstance(stays, int) and stays == slow_kept(keep, P, sinks + window)
        assert min(P, sinks + window) <= stays <= P
        assert stays == P or (P > sinks + window and keep < 1)


@pytest.mark.parametrize("N", [1, 7, 128])
@pytest.mark.parametrize("keep", [0.1, 0.7, 1.0])
def test_budget_cuts_a_prompt_that_reaches_it(keep, N):
    e = Eviction("recent", keep, budget=40, evict_every=N, window=8)
    chunked = dataclasses.replace(e, prefill_chunk=16)
    assert e.row_budget() == chunked.row_budget() == 40
    for P in range(1, 301):
        kept = slow_kept(keep, P, 12)
        assert e.stays(P) == (40 if kept >= 40 + N else kept)
        assert chunked.stays(P) == min(kept, 40), "between chunks, too, the budget holds"
    for P in range(1, 301):
        alone = Eviction("recent", keep, prefill_chunk=16, window=8)
        assert alone.stays(P) == slow_kept(keep, P, 12)


@pytest.mark.parametrize("L", [1, 2, 3, 4, 7, 28])
@pytest.mark.parametrize("sinks,window", [(4, 8), (0, 1), (10, 30)])
def test_pyramid_is_a_falling_line_and_spends_the_mean(L, sinks, window):
    for keep in (0.1, 0.5, 0.7, 0.9, 1.0):
        e = Eviction("snapkv", keep, layer_budget="pyramid", sinks=sinks, window=window)
        for P in range(1, 301):
            mean = slow_kept(keep, P, sinks + window)
            stays = [e.stays(P, layer, L) for layer in range(L)]
            assert all(isinstance(x, int) for x in stays)
            assert stays == slow_pyramid(mean, P, sinks + window, L)
            assert sum(stays) == L * mean and stays == sorted(stays, reverse=True)
            assert max(stays) <= P and min(stays) >= min(P, sinks + window)
    for budget in range(sinks + window, 301):
        e = Eviction(layer_budget="pyramid", budget=budget, sinks=sinks, window=window)
        live = [e.row_budget(layer, L) for layer in range(L)]
        assert all(isinstance(x, int) for x in live)
        assert live == slow_pyramid(budget, 10**9, sinks + window, L)
        assert sum(live) == L * budget and live == sorted(live, reverse=True)
        assert min(live) >= sinks + window


def test_pyramid_from_three_halves_to_half():
    e = Eviction(keep=0.5, layer_budget="pyramid", budget=100)
    assert [e.row_budget(layer, 5) for layer in range(5)] == [150, 125, 100, 75, 50]
    e = Eviction(keep=0.5, layer_budget="pyramid")
    assert [e.stays(200, layer, 5) for layer in range(5)] == [150, 125, 100, 75, 50]
    assert [e.stays(200, layer, 2) for layer in range(2)] == [150, 50]
    uniform = Eviction(keep=0.5, budget=100, evict_every=1)
    assert [uniform.row_budget(layer, 5) for layer in range(5)] == [100] * 5
    assert [uniform.stays(400, layer, 5) for layer in range(5)] == [100] * 5


@pytest.mark.parametrize("N,chunk", [(1, None), (30, None), (30, 16)])
def test_pyramid_with_keep_and_budget_keeps_every_layer_below_its_trigger(N, chunk):
    e = Eviction("recent", 0.6, layer_budget="pyramid", budget=60, evict_every=N, window=8,
                 prefill_chunk=chunk)
    for P in range(1, 301):
        kept, live = (slow_pyramid(*x, 12, 7) for x in ((slow_kept(0.6, P, 12), P), (60, 999)))
        slack = 1 if chunk else N
        stays = [e.stays(P, layer, 7) for layer in range(7)]
        assert all(s < b + slack for s, b in zip(stays, live, strict=True))
        assert stays == [b if k >= b + slack else k for k, b in zip(kept, live, strict=True)]


@pytest.mark.parametrize("policy", NAMES)
def test_sinks_and_protected_keys_fit_every_budget(policy):
    """Of all schedules that are accepted; and a schedule is refused only below its floor."""
    accepted = 0
    for sinks in (0, 1, 4, 9):
        for recent in (None, 1, 5, 12, 40):
            for window in (1, 5, 8, 13, 32):
                floor = slow_floor(policy, sinks, recent, window)
                for budget in sorted({1, floor - 1, floor, floor + 1, 2 * floor, 100} - {0}):
                    options = {"sinks": sinks, "recent": recent, "window": window}
                    if budget < floor:
                        with pytest.raises(BadInput):
                            Eviction(policy, budget=budget, **options)
                        continue
                    accepted += 1
                    e = Eviction(policy, 0.3, budget=budget, layer_budget="pyramid", **options)
                    assert e.floor == floor
                    for layer in range(3):
                        live, stays = e.row_budget(layer, 3), e.stays(200, layer, 3)
                        for n, decoding in ((live, True), (live, False), (stays, False)):
                            newest = e.newest(n, decoding=decoding)
                            assert newest >= max(1, e.votes(decoding=decoding))
                            assert sinks + newest <= n
    assert accepted > 300


def test_how_many_vote_and_how_many_newest_stay():
    for policy in NAMES:
        for window in (1, 5, 8, 32):
            e = Eviction(policy, window=window)
            for decoding in (False, True):
                assert e.votes(decoding=decoding) == slow_votes(policy, window, decoding)
                if policy != "h2o":
                    newest = min(window, 8) if decoding else window
                    assert e.newest(100, decoding=decoding) == newest
    assert Eviction("snapkv", recent=3).newest(100, decoding=True) == 8, "voters stay"
    assert Eviction("snapkv", recent=20).newest(100, decoding=True) == 20
    assert Eviction("tova", recent=3, window=16).newest(100, decoding=False) == 3
    for decoding in (False, True):
        assert Eviction("h2o").newest(101, decoding=decoding) == 50, "half of the budget"
        assert Eviction("h2o", recent=7).newest(101, decoding=decoding) == 7
        assert Eviction("h2o", sinks=9).newest(12, decoding=decoding) == 3, "and the sinks"


@pytest.mark.parametrize("sinks,window", SHAPES)
@pytest.mark.parametrize("keep", [0.1, 0.3, 0.5, 0.9, 1.0])
def test_evict_keeps_the_budget_the_sinks_and_the_newest(keep, sinks, window):
    e = Eviction("random", keep, sinks=sinks, window=window)
    draw = torch.Generator().manual_seed(0)
    for P in range(1, 301):
        pos = torch.arange(P).repeat(1, 3, 1)
        record = torch.full((1, 3, P + 2), NEVER, dtype=torch.int32)
        evict(torch.randn(1, 3, P, generator=draw), pos, record, t=P - 1, budget=e.stays(P),
              sinks=sinks, recent=window)
        live = pos >= 0
        assert (live.sum(-1) == e.stays(P)).all()
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


@pytest.mark.parametrize("value", [0.0, -3.0, nan, inf, -inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_scores_keep_the_sinks_and_the_newest(value, dtype):
    assert one([value] * 20, budget=7, sinks=4, recent=2, dtype=dtype) == [0, 1, 2, 3, 17, 18, 19]


def test_order_of_special_values():
    values = [inf, 1e30, 1.0, 1e-40, 0.0, -1e-40, -1.0, -1e30, -inf]
    for n in range(1, len(values) + 1):  # the last position is protected, whatever its score
        assert one([*values, nan], budget=n + 1) == [*range(n), 9]
        assert one([nan, *values[::-1], nan], budget=n + 1) == [*range(10 - n, 11)]
    assert one([nan, -1e38, nan, 2.0, 0.0], budget=3) == [1, 3, 4]
    assert one([-nan, -1e38, nan, 2.0, 0.0], budget=3) == [1, 3, 4]
    assert one([0.0, -0.0, 0.0, -0.0, 5.0], budget=3) == [2, 3, 4], "-0.0 equals 0.0"
    assert one([-0.0, 0.0, -0.0, 0.0, 5.0], budget=3) == [2, 3, 4]


def test_no_score_beats_the_protected():
    assert one([-inf, nan] + [inf] * 6 + [nan, -inf], budget=5, sinks=2,
               recent=2) == [0, 1, 7, 8, 9]
    assert one([3e38] * 6 + [-3e38] * 2, budget=3, recent=2) == [5, 6, 7]


def test_bfloat16_scores():
    """256 + 1 is 256 in bfloat16: protection must not be an addition."""
    score = [0.0, 256.0, 256.0, 257.0, 255.0, 1.0, 0.0]  # 257 is rounded to 256
    assert one(score, budget=4, sinks=1, recent=1, dtype=torch.bfloat16) == [0, 2, 3, 6]
    assert one(score, budget=3, sinks=1, recent=1) == [0, 3, 6]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float16,
                                   torch.bfloat16, torch.float32, torch.float64])
def test_scores_of_any_type(dtype):
    score = [3, 0, 7, 200, 7, 1, 0]
    assert one(score, budget=4, sinks=1, recent=1, dtype=dtype) == [0, 3, 4, 6]
    assert one([1e300, 0.0, -1e300, 0.0], budget=2, dtype=torch.float64) == [0, 3]


def test_neighbouring_float32_scores_differ():
    up = [1 + 2**-23 * i for i in (3, 2, 1, 0)]
    assert one([*up, 0.0], budget=3) == [0, 1, 4]
    assert one([*(-x for x in up[::-1]), 0.0], budget=3) == [0, 1, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evict_is_the_slow_sort(dtype):
    """Any slot order, free slots, ties, special values, an earlier record, rows left alone."""
    draw = torch.Generator().manual_seed(1)
    special = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.0, -1.0])
    choices = [None, torch.tensor([True, False]), torch.tensor([False, True]),
               torch.tensor([True, True]), torch.tensor([False, False])]
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
        options = {"t": t, "budget": 5 + case % 20, "sinks": case % 3, "recent": 1 + case % 2,
                   "rows": choices[case // 20 % 5]}
        want = slow_evict(score.to(dtype), pos, record, **options)
        evict(score.to(dtype), pos, record, **options)
        assert torch.equal(pos, want[0]) and torch.equal(record, want[1])


def test_only_the_chosen_rows_change():
    pos = torch.arange(6).repeat(3, 2, 1)
    record = torch.full((3, 2, 8), NEVER, dtype=torch.int32)
    evict(torch.zeros(3, 2, 6), pos, record, t=5, budget=2, sinks=0, recent=1,
          rows=torch.tensor([False, True, False]))
    assert (pos[::2] == torch.arange(6)).all() and (record[::2] == NEVER).all()
    assert ((pos[1] >= 0).sum(-1) == 2).all() and ((record[1] == 6).sum(-1) == 4).all()


def test_free_slots_never_count_and_are_never_recorded():
    pos = torch.tensor([[[-1, 3, -1, 0, 5, -1, 4]]])
    record = torch.full((1, 1, 8), NEVER, dtype=torch.int32)
    score = torch.tensor([[[9.0, 1.0, inf, 2.0, 0.0, nan, 3.0]]])
    evict(score, pos, record, t=5, budget=3, sinks=0, recent=1)
    assert pos.tolist() == [[[-1, -1, -1, 0, 5, -1, 4]]]
    assert record[0, 0].tolist() == [NEVER] * 3 + [6] + [NEVER] * 4
    before = pos.clone(), record.clone()
    evict(score, pos, record, t=6, budget=3, sinks=0, recent=1)  # at the budget: nothing happens
    evict(score, pos, record, t=6, budget=99, sinks=0, recent=1)
    assert torch.equal(pos, before[0]) and torch.equal(record, before[1])


def test_the_record_is_written_once():
    pos = torch.arange(6).view(1, 1, 6)
    record = torch.full((1, 1, 9), NEVER, dtype=torch.int32)
    score = torch.tensor([[[0.0, 5.0, 1.0, 4.0, 3.0, 9.0]]])
    evict(score, pos, record, t=5, budget=4, sinks=0, recent=1)
    assert record[0, 0].tolist() == [6, NEVER, 6, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER]
    pos[0, 0, 0], pos[0, 0, 2] = 6, 7  # the freed slots are used again
    evict(score, pos, record, t=7, budget=3, sinks=0, recent=1)
    assert record[0, 0].tolist() == [6, NEVER, 6, 8, 8, NEVER, 8, NEVER, NEVER]
    assert pos.tolist() == [[[-1, 1, 7, -1, -1, 5]]]


@pytest.mark.parametrize("score,got", [
    (torch.zeros(2, 5, 3), "(2, 5, 3)"), (torch.zeros(2, 3), "(2, 3)"),
    (torch.zeros(1, 3, 5), "(1, 3, 5)"), (torch.zeros(2, 3, 1), "(2, 3, 1)"),
    (torch.zeros(()), "()"), ([[[0.0] * 5] * 3] * 2, "list"), (None, "NoneType"), (1.0, "float"),
])
def test_a_score_of_another_shape_is_refused(score, got):
    pos = torch.arange(5).repeat(2, 3, 1)
    with pytest.raises(BadInput) as e:
        evict(score, pos, torch.full((2, 3, 5), NEVER), t=4, budget=3, sinks=0, recent=1)
    assert str(e.value).startswith(f"the eviction policy returned {got}; expected")
    assert "(2, 3, 5)" in str(e.value) and "\n" not in str(e.value)
    assert (pos == torch.arange(5)).all()


# ---- policies: scores, one head at a time -------------------------------------------------------


def slow_attention(seen, b, head):
    """(W, S) probabilities of one query head over its live keys, 0 elsewhere."""
    (_, Hq, W, D), (_, Hkv, S, _) = seen.q.shape, seen.k.shape
    h, out = head // (Hq // Hkv), np.zeros((W, S))
    for w in range(W):
        q = seen.q[b, head, w].double().numpy()
        see = [j for j in range(S) if 0 <= seen.pos[b, h, j] <= seen.t - W + 1 + w]
        z = np.array([q @ seen.k[b, h, j].double().numpy() for j in see]) / math.sqrt(D)
        out[w, see] = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    return out


def pool(votes, pos, t, W):
    """Window zeroed, then the largest of 7 neighbours in position order. votes: of live keys."""
    votes = [v if p <= t - W else 0.0 for v, p in zip(votes, pos, strict=True)]
    order = sorted(range(len(pos)), key=lambda j: pos[j])
    out = np.zeros(len(pos))
    for i, j in enumerate(order):
        out[j] = max(votes[n] for n in order[max(i - 3, 0) : i + 4])
    return out


def live_of(seen, b, h):
    """Slots of the live keys of one head, their positions and keys."""
    slots = [j for j, p in enumerate(seen.pos[b, h].tolist()) if p >= 0]
    return slots, seen.pos[b, h, slots].tolist(), seen.k[b, h, slots].double().numpy()


def slow_snapkv(seen, b, h):
    (slots, pos, _), groups = live_of(seen, b, h), seen.q.shape[1] // seen.k.shape[1]
    heads = [slow_attention(seen, b, h * groups + g) for g in range(groups)]
    return pool(np.mean(heads, axis=(0, 1))[slots], pos, seen.t, seen.q.shape[2])


def slow_tova(seen, b, h):
    slots, Hq = live_of(seen, b, h)[0], seen.q.shape[1]
    last = dataclasses.replace(seen, q=seen.q[:, :, -1:])
    return sum(slow_attention(last, b, head)[0, slots] for head in range(Hq)) / Hq


def slow_rkv(seen, b, h, exempt=max):
    slots, pos, k = live_of(seen, b, h)
    n, total = len(slots), np.zeros(len(slots))
    for i in range(n):
        cosine = {j: k[i] @ k[j] / np.linalg.norm(k[i]) / np.linalg.norm(k[j])
                  for j in range(n) if j != i}
        near = [j for j in cosine if cosine[j] > 0.5]
        spared = exempt(near, key=lambda j: pos[j]) if near and exempt else None
        for j in cosine:
            total[j] += cosine[j] if j != spared else 0
    redundancy = np.exp(total / n) / np.exp(total / n).sum()
    return 0.1 * slow_snapkv(seen, b, h) - 0.9 * redundancy


def slow_keydiff(seen, b, h):
    k = live_of(seen, b, h)[2]
    unit = [x / np.linalg.norm(x) for x in k]
    mean = sum(unit) / len(unit)
    return np.array([-(x @ mean) / np.linalg.norm(mean) for x in unit])


def slow_random(seen, b, h):
    """splitmix64's finaliser, on unsigned 64-bit integers."""
    M, out = 2**64, []
    for x in live_of(seen, b, h)[1]:
        for part in (h, seen.layer, seen.sequence, seen.seed):
            x = (x + part * 0x9E3779B9 + 1) % M
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % M
            x = (x ^ x >> 27) * 0x94D049BB133111EB % M
            x ^= x >> 31
        out.append((x >> 40) - (2**24 if x >= M // 2 else 0))
    return np.array(out)


SLOW = {
    "snapkv": slow_snapkv, "tova": slow_tova, "rkv": slow_rkv, "keydiff": slow_keydiff,
    "random": slow_random,
    "h2o": lambda seen, b, h: seen.mass[b, h, live_of(seen, b, h)[0]].double().numpy(),
    "recent": lambda seen, b, h: np.array(live_of(seen, b, h)[1]),
    "knorm": lambda seen, b, h: -np.array([math.sqrt(x @ x) for x in live_of(seen, b, h)[2]]),
}


def make_seen(policy="snapkv", Hq=4, Hkv=2, *, B=2, S=44, W=8, D=16, t=70, dtype=torch.float64):
    """Live keys of any age in any slot order, other ones and as many in each row and head as
    chance gives, with near-duplicates; free slots between."""
    draw = torch.Generator().manual_seed(2)
    k = torch.randn(B, Hkv, S, D, generator=draw, dtype=torch.float64)
    for j in range(0, S, 2):  # half of the keys are near others, some of them twins of twins
        other = int(torch.randint(0, S, (), generator=draw))
        k[:, :, j] = k[:, :, other] + 0.2 * k[:, :, j]
    k *= 0.5 + torch.rand(B, Hkv, S, 1, generator=draw)
    old = torch.rand(B, Hkv, t - W + 1, generator=draw).argsort(-1)[..., : S - W]
    old[torch.rand(old.shape, generator=draw) < 0.25] = -1
    pos = torch.cat((old, torch.arange(t - W + 1, t + 1).expand(B, Hkv, W)), dim=-1)
    pos = pos.gather(-1, torch.rand(B, Hkv, S, generator=draw).argsort(-1))
    if policy == "tova":
        pos = pos[:, :1].repeat(1, Hkv, 1)
    mass = torch.rand(B, Hkv, S, generator=draw) if policy == "h2o" else None
    q = 2 * torch.randn(B, Hq, W, D, generator=draw)
    return Seen(q.to(dtype), k.to(dtype), pos, mass, t, layer=1, seed=7, sequence=3)


def live_scores(policy, seen):
    score = POLICIES[policy].score(seen)
    assert score.shape == seen.pos.shape
    return score[seen.pos >= 0].double()


def kept_positions(policy, seen):
    """(B, Hkv, budget) positions that stay, sorted."""
    pos = seen.pos.clone()
    record = torch.full((*pos.shape[:2], seen.t + 1), NEVER, dtype=torch.int32)
    evict(POLICIES[policy].score(seen), pos, record, t=seen.t, budget=20, sinks=4, recent=8)
    return pos.sort(-1).values[..., -20:]


def test_the_policies_are_eight():
    assert set(SLOW) == set(POLICIES) == set(NAMES)


@pytest.mark.parametrize("Hq,Hkv", [(2, 2), (4, 2), (14, 2), (3, 3)])
@pytest.mark.parametrize("policy", NAMES)
def test_a_score_is_its_formula(policy, Hq, Hkv):
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)):
        seen = make_seen(policy, Hq, Hkv, dtype=dtype)
        score = POLICIES[policy].score(seen)
        assert score.dtype in (torch.float32, torch.float64), "4,096 bfloat16 scores are few values"
        for b in range(2):
            for h in range(Hkv):
                got = score[b, h, live_of(seen, b, h)[0]].double().numpy()
                want = SLOW[policy](seen, b, h)
                assert np.abs(got - want).max() <= bound
                assert want.std() > 1e-3 * abs(want).mean(), "the scores should say something"
                if policy not in ("h2o", "recent", "random"):  # the control: other keys
                    other = dataclasses.replace(seen, k=seen.k * torch.linspace(0.5, 1.5, 16))
                    assert np.abs(got - SLOW[policy](other, b, h)).max() > 1e-4


@pytest.mark.parametrize("policy", NAMES)
def test_rows_are_independent(policy):
    seen, other = make_seen(policy), make_seen(policy)
    other.k[0] = other.k[0].flip(1) + 1
    other.q[0] *= 2
    if policy == "h2o":
        other.mass[0] += 1
    before, after = POLICIES[policy].score(seen), POLICIES[policy].score(other)
    assert torch.equal(before[1], after[1])
    assert policy in ("recent", "random") or not torch.equal(before[0], after[0])


@pytest.mark.parametrize("policy", NAMES)
def test_slot_order_carries_no_meaning(policy):
    seen = make_seen(policy)
    order = torch.rand(seen.pos.shape, generator=torch.Generator().manual_seed(3)).argsort(-1)
    if policy == "tova":
        order = order[:, :1].expand(seen.pos.shape)
    moved = dataclasses.replace(
        seen, k=seen.k.gather(2, order[..., None].expand(seen.k.shape)),
        pos=seen.pos.gather(-1, order),
        mass=None if seen.mass is None else seen.mass.gather(-1, order))
    want, got = (POLICIES[policy].score(s).double() for s in (seen, moved))
    live = moved.pos >= 0
    assert (want.gather(-1, order) - got)[live].abs().max() < 1e-12
    kept = kept_positions(policy, seen)
    assert torch.equal(kept, kept_positions(policy, moved))
    control = dataclasses.replace(moved, k=seen.k, mass=seen.mass)  # what they hold stayed behind
    assert policy in ("recent", "random") or not torch.equal(
        kept, kept_positions(policy, control))


@pytest.mark.parametrize("garbage", [1e4, nan, inf, -inf])
@pytest.mark.parametrize("policy", NAMES)
def test_what_a_free_slot_holds_does_not_matter(policy, garbage):
    seen, dirty = make_seen(policy), make_seen(policy)
    dirty.k[dirty.pos < 0] = garbage
    if policy == "h2o":
        dirty.mass[dirty.pos < 0] = garbage
    worst = (live_scores(policy, seen) - live_scores(policy, dirty)).abs().max().item()
    assert worst < 1e-12
    assert torch.equal(kept_positions(policy, seen), kept_positions(policy, dirty))


def test_snapkv_window_does_not_lift_its_neighbours():
    draw = torch.Generator().manual_seed(2)
    k, q = torch.randn(2, 2, 45, 16, generator=draw), 2 * torch.randn(2, 6, 8, 16, generator=draw)
    seen = Seen(q, k, torch.arange(45).expand(2, 2, 45), None, 44, 0, 0, 0)
    seen.k[:, :, -8:] *= 20  # nearly all attention stays in the window
    assert (snapkv(seen)[..., -4:] == 0).all()
    assert snapkv(seen)[..., 30:37].max() < 0.2
    # The sinks keep their score at the border of the pooling.
    seen.k[:, :, -8:] /= 20
    seen.k[:, :, 0] = 20 * seen.q[:, ::3].mean(2)
    assert (snapkv(seen).argmax(-1) <= 3).all()


def test_tova_keeps_one_set_for_all_heads():
    kept = kept_positions("tova", make_seen("tova", 14, 2))
    assert torch.equal(kept[:, 0], kept[:, 1]) and not torch.equal(kept[0], kept[1])
    kept = kept_positions("snapkv", make_seen("tova", 14, 2))  # the control
    assert not torch.equal(kept[:, 0], kept[:, 1])


@pytest.mark.parametrize("exempt", [None, min], ids=["none exempt", "the oldest exempt"])
def test_rkv_exempts_the_newest_near_duplicate(exempt):
    seen = make_seen()
    got = rkv(seen)[0, 1, live_of(seen, 0, 1)[0]].numpy()
    assert np.abs(got - slow_rkv(seen, 0, 1)).max() < 1e-12
    assert np.abs(got - slow_rkv(seen, 0, 1, exempt)).max() > 1e-4


def test_rkv_keeps_the_newest_of_twins():
    """Five directions, six keys each, with equal attention: one newest of each survives."""
    direction = torch.eye(5, 8).repeat_interleave(6, dim=0)
    order = torch.rand(30, generator=torch.Generator().manual_seed(0)).argsort()
    k = torch.cat((direction[order], torch.eye(3, 8).roll(5, -1)))[None, None]  # then the window
    seen = Seen(torch.zeros(1, 1, 3, 8), k, torch.arange(33).view(1, 1, 33), None, 32, 0, 0, 0)
    pos, record = seen.pos.clone(), torch.full((1, 1, 33), NEVER, dtype=torch.int32)
    evict(rkv(seen), pos, record, t=32, budget=8, sinks=0, recent=3)
    newest = sorted(int((order // 6 == d).nonzero().max()) for d in range(5))
    assert pos[pos >= 0].tolist() == [*newest, 30, 31, 32]


@pytest.mark.parametrize("elements", [1, 1000, 2**25])
def test_rkv_in_pieces(elements, monkeypatch):
    """The matrix of similarities is built some rows at a time."""
    monkeypatch.setattr(eviction, "ELEMENTS", elements)
    seen = make_seen()
    got, want = rkv(seen)[1, 0, live_of(seen, 1, 0)[0]].numpy(), slow_rkv(seen, 1, 0)
    assert np.abs(got - want).max() < 1e-12


def test_recent_is_sinks_and_newest():
    pos = torch.arange(100).repeat(1, 2, 1)
    seen = Seen(torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 100, 4), pos.clone(), None, 99, 0, 0, 0)
    record = torch.full(pos.shape, NEVER, dtype=torch.int32)
    evict(eviction.recent(seen), pos, record, t=99, budget=30, sinks=4, recent=8)
    assert pos[0, 1][pos[0, 1] >= 0].tolist() == [*range(4), *range(74, 100)]


# ---- policies inside the cache: read off the model ----------------------------------------------


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


def spy(monkeypatch, policy: str) -> list:
    """(seen, score) of each time that the policy is asked; copies, as the cache goes on."""
    asked, plain = [], POLICIES[policy]

    def score(seen):
        copy = dataclasses.replace(seen, q=seen.q.clone(), k=seen.k.clone(), pos=seen.pos.clone(),
                                   mass=None if seen.mass is None else seen.mass.clone())
        asked.append((copy, plain.score(seen).clone()))
        return asked[-1][1]

    monkeypatch.setitem(POLICIES, policy, plain._replace(score=score))
    return asked


def feed(e: Eviction, P: int, R: int, *, G=2, dtype=torch.float64) -> SimpleNamespace:
    """Give a model a prompt and G continuations through the cache. Of each layer q, k, v, o of
    whole sequences (G, H, P + R, D), the record, and the gain of the queries' norm."""
    model = make_model().to(dtype)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 30, (G, P + R), generator=draw)
    ids[:, :P] = ids[:1, :P]
    cache = KVCache(model.cfg, [P], G, R, eviction=e, sequence=[0], dtype=dtype)
    parts = [[] for _ in range(model.cfg.L)]

    def watched(inside):
        def attend(layer, q, k, v):
            o = inside(layer, q, k, v)
            parts[layer].append([x.expand(G, -1, -1, -1) for x in (q, k, v, o)])
            return o
        return attend

    with torch.no_grad():
        for chunk in cache.chunks(0):
            pos = torch.arange(P)[None, chunk]
            model(ids[:1, :P][:, chunk], pos, watched(cache.prefill(0, chunk)))
        for t in range(P, P + R):
            attend = watched(cache.decode(torch.full((G,), t), torch.ones(G, dtype=torch.bool)))
            model(ids[:, t : t + 1], torch.full((G, 1), t), attend)
    whole = [[torch.cat(x, dim=2).double().numpy() for x in zip(*layer, strict=True)]
             for layer in parts]
    gain = [layer.self_attn.q_norm.weight.mean().item() for layer in model.layers]
    return SimpleNamespace(qkvo=whole, record=cache.evict_at[0].numpy(), gain=gain)


def probabilities(run, layer, g, h, gain=1.0):
    """(groups, T, T): what each query of a KV head attended to, from q, k and the record."""
    q, k, _, _ = (x[g] for x in run.qkvo[layer])
    groups, T = len(q) // len(k), q.shape[1]
    out = np.zeros((groups, T, T))
    for n in range(groups):
        for i in range(T):
            see = [j for j in range(i + 1) if run.record[layer, g, h, j] > i]
            z = k[h, see] @ q[h * groups + n, i] / gain / math.sqrt(q.shape[2])
            out[n, i, see] = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    return out


def check_outputs(run):
    """The probabilities are the model's own: their product with the values is what it computed."""
    for layer, (_, _, v, o) in enumerate(run.qkvo):
        for g in range(v.shape[0]):
            for h in range(v.shape[1]):
                p = probabilities(run, layer, g, h)
                n = len(p)
                assert np.abs(p @ v[g, h] - o[g, h * n : h * n + n]).max() < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_snapkv_scores_are_the_models_attention(dtype, monkeypatch):
    """The probabilities are read off the model: attention to values that are the identity."""
    model, P, W, votes, bare = make_model().to(dtype), 60, 8, [], []
    asked = spy(monkeypatch, "snapkv")
    ids, pos = torch.arange(P)[None] * 7 % 30, torch.arange(P)[None]
    cache = KVCache(model.cfg, [P], 1, 1, eviction=Eviction("snapkv", 0.5, window=W), sequence=[0],
                    dtype=dtype)
    inside = cache.prefill(0, slice(0, P))

    def attend(layer, q, k, v):
        eye = torch.eye(P, dtype=dtype).expand(1, 2, P, P)
        gain = model.layers[layer].self_attn.q_norm.weight.mean()
        for found, x in ((votes, q), (bare, q / gain)):
            attention = causal(layer, x, k, eye)[0, :, -W:].double().numpy()  # (Hq, W, P)
            found.append([pool(attention[2 * h : 2 * h + 2].mean((0, 1)), range(P), P - 1, W)
                          for h in range(2)])
        return inside(layer, q, k, v)

    with torch.no_grad():
        model(ids, pos, attend)
    got = torch.cat([score for _, score in asked]).numpy()
    assert len(got) == 3 and np.abs(got - np.array(votes)).max() < 1e-5
    assert np.abs(got - np.array(bare)).max() > 1e-2, "the control: queries with another gain"
    assert got.max() > 5 / P, "attention far from uniform"


def test_snapkv_scores_are_the_models_attention_while_decoding(monkeypatch):
    """With an eviction every 8 tokens, the 8 voters saw the keys that are live now."""
    asked, P = spy(monkeypatch, "snapkv"), 40
    run = feed(Eviction(keep=1.0, budget=24, evict_every=8, window=20), P, 33)
    check_outputs(run)
    later = [(seen, score) for seen, score in asked if seen.t >= P]
    assert [seen.t for seen, _ in later[::3]] == [47, 55, 63, 71]
    worst = control = 0
    for seen, score in later:
        for g in range(2):
            for h in range(2):
                slots, pos, _ = live_of(seen, g, h)
                assert len(slots) == 32
                for gain in (1.0, run.gain[seen.layer]):
                    p = probabilities(run, seen.layer, g, h, gain)
                    voters = p[:, seen.t - 7 : seen.t + 1].mean((0, 1))
                    want = pool(voters[pos], pos, seen.t, 8)
                    error = np.abs(score[g, h, slots].numpy() - want).max()
                    worst, control = (max(worst, error), control) if gain == 1.0 else (
                        worst, max(control, error))
    assert worst < 1e-9 and control > 1e-2


@pytest.mark.parametrize("chunk", [None, 16])
def test_h2o_mass_is_all_attention_received(chunk, monkeypatch):
    """The column sums of what queries attended to, from the prompt's first to the last."""
    asked, P = spy(monkeypatch, "h2o"), 40
    run = feed(Eviction("h2o", 1.0, budget=24, evict_every=3, window=4, prefill_chunk=chunk), P, 20)
    check_outputs(run)
    assert [seen.t for seen, _ in asked if seen.t >= P][::3] == [42, 45, 48, 51, 54, 57]
    control = 0
    for seen, score in asked:
        for g in range(len(seen.pos)):
            for h in range(2):
                slots, pos, _ = live_of(seen, g, h)
                p = probabilities(run, seen.layer, g, h)[:, : seen.t + 1].mean(0)
                got = score[g, h, slots].numpy()
                assert np.abs(got - p.sum(0)[pos]).max() < 1e-9
                control = max(control, np.abs(got - p[P:].sum(0)[pos]).max())
    assert control > 0.5, "the control: queries of the prompt do not count"


def test_h2o_mass_is_forgotten_with_the_key():
    cfg = make_model().cfg
    slots = Slots(cfg, 1, 4, votes=0, mass=True, dtype=torch.float64, device="cpu")
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, H, 4, 16, generator=draw, dtype=torch.float64) for H in (4, 2, 2))
    slots.write(k, v, torch.arange(4)[None])
    slots.attend(q, torch.arange(4)[None])
    before = slots.mass.clone()
    assert (before.sum(-1) - 4).abs().max() < 1e-12 and before.min() > 0.05
    slots.pos[:, 0, 1] = slots.pos[:, 1, 2] = -1  # evicted
    slots.write(k[:, :, :1], v[:, :, :1], torch.tensor([[4]]))
    assert slots.pos[0].tolist() == [[0, 4, 2, 3], [0, 1, 4, 3]]
    assert slots.mass[0, 0, 1] == slots.mass[0, 1, 2] == 0
    slots.attend(q[:, :, :1], torch.tensor([[4]]))
    gained = slots.mass - before
    gained[0, 0, 1], gained[0, 1, 2] = slots.mass[0, 0, 1], slots.mass[0, 1, 2]
    assert (gained.sum(-1) - 1).abs().max() < 1e-12 and gained.min() > 0


def test_h2o_gives_a_new_token_time():
    """Half of the budget is for the newest."""
    P, R, B, evictions = 30, 60, 24, {}
    for recent in (None, 1):
        e = Eviction("h2o", 1.0, budget=B, evict_every=1, sinks=2, recent=recent, window=1)
        record = evictions[recent] = feed(e, P, R).record.astype(np.int64)  # (L, G, Hkv, T)
        for t in range(P, P + R):
            live = (record > t + 1) & (np.arange(P + R) <= t)
            assert (live.sum(-1) == B).all()
    age = {recent: record[..., P:] - np.arange(P, P + R) for recent, record in evictions.items()}
    assert (age[None] >= B // 2).all()
    assert (age[1] == 2).mean() > 0.5, "the control: gone before a second query could ask"


@pytest.mark.parametrize("recent,stays", [(None, True), (1, False)])
def test_h2o_keeps_a_newcomer_that_is_attended_to(recent, stays):
    """Half of all attention goes to key 40: with time to collect it, it replaces an older one."""
    e = Eviction("h2o", 1.0, budget=16, evict_every=1, sinks=2, recent=recent, window=1)
    slots = Slots(make_model().cfg, 1, 31, votes=0, mass=True, dtype=torch.float64, device="cpu")
    k = torch.zeros(1, 2, 70, 16, dtype=torch.float64)
    k[:, :, 40, 0] = math.log(16)
    q, record = torch.zeros(1, 4, 70, 16, dtype=torch.float64), torch.full((1, 2, 70), NEVER).int()
    q[..., 0] = 4  # times D**-0.5: the score is k's first number
    for step in (slice(0, 30), *(slice(t, t + 1) for t in range(30, 70))):
        at = torch.arange(70)[None, step]
        slots.write(k[:, :, step], k[:, :, step], at)
        slots.attend(q[:, :, step], at)
        evict(slots.mass, slots.pos, record, t=step.stop - 1, budget=16, sinks=2,
              recent=e.newest(16, decoding=True))
    assert record[0, :, 40].tolist() == ([NEVER] * 2 if stays else [42] * 2)


@pytest.mark.parametrize("policy,W,V", [("recent", 0, 0), ("snapkv", 9, 8), ("rkv", 8, 8),
                                        ("tova", 1, 1)])
def test_a_policy_sees_its_queries_and_every_live_key(policy, W, V, monkeypatch):
    """What the cache shows: the last W queries (V while decoding), all keys, and who asks."""
    asked, P = spy(monkeypatch, policy), 30
    e = Eviction(policy, 1.0, budget=20, evict_every=2, window=9, seed=5)
    run = feed(e, P, 9)
    assert [(s.t, s.layer) for s, _ in asked] == [
        (t, layer) for t in (29, 31, 33, 35, 37) for layer in range(3)]
    for s, _ in asked:
        prefill = s.t < P
        n, (q, k, _, _) = W if prefill else V, run.qkvo[s.layer]
        assert s.q.shape == (1 if prefill else 2, 4, n, 16) and s.seed == 5
        assert np.array_equal(s.q.numpy(), q[: len(s.q), :, s.t + 1 - n : s.t + 1])
        for b in range(len(s.q)):
            for h in range(2):
                slots, pos, keys = live_of(s, b, h)
                assert len(slots) == (P if prefill else 22) and pos.count(s.t) == 1
                assert np.array_equal(keys, k[b, h, pos])
        assert s.mass is None


def test_a_prompt_within_budget_asks_no_policy(monkeypatch):
    asked, model = spy(monkeypatch, "recent"), make_model()
    cache = KVCache(model.cfg, [3, 30], 1, 1, eviction=Eviction("recent", 0.1, window=9, seed=5),
                    sequence=[40, 41], dtype=torch.float32)
    with torch.no_grad():
        for n, P in enumerate((3, 30)):
            pos = torch.arange(P)[None]
            model(pos, pos, cache.prefill(n, slice(0, P)))
    assert [(s.layer, s.sequence, s.t) for s, _ in asked] == [(i, 41, 29) for i in range(3)]


def test_a_policy_of_ones_own_with_a_wrong_shape_is_refused(monkeypatch):
    plain = POLICIES["knorm"]
    monkeypatch.setitem(POLICIES, "knorm", plain._replace(score=lambda s: plain.score(s).mean(1)))
    with pytest.raises(BadInput, match=r"returned \(1, 40\); expected .* \(1, 2, 40\)"):
        feed(Eviction("knorm", 0.5, window=8), 40, 1)


# ---- random -------------------------------------------------------------------------------------


def priorities(P=64, *, layer=0, sequence=0, seed=0, heads=2, positions=None) -> torch.Tensor:
    pos = torch.tensor(positions) if positions else torch.arange(P)
    empty = torch.zeros(1, heads, len(pos), 2)
    return random(Seen(empty, empty, pos.expand(1, heads, -1), None, P - 1, layer, seed,
                       sequence))[0]


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


def test_random_is_uniform_over_a_prompt():
    P, sinks, recent, budget, n = 80, 4, 8, 40, 600
    count = torch.zeros(P)
    for sequence in range(n):
        pos = torch.arange(P).repeat(1, 2, 1)
        record = torch.full((1, 2, P), NEVER, dtype=torch.int32)
        evict(priorities(P, sequence=sequence)[None], pos, record, t=P - 1, budget=budget,
              sinks=sinks, recent=recent)
        count += (pos[0] >= 0).sum(0)
    assert (count[:sinks] == 2 * n).all() and (count[-recent:] == 2 * n).all()
    rest, m = count[sinks:-recent], P - sinks - recent
    share = (budget - sinks - recent) / m
    # The counts of m keys sum to a constant: variance n share (1 - share) m / (m - 1) a key.
    chi2 = ((rest - 2 * n * share) ** 2).sum() / (2 * n * share * (1 - share)) * (m - 1) / m
    assert abs(chi2 - (m - 1)) < 4 * (2 * (m - 1)) ** 0.5, chi2


def survivors(draw, *, tokens=2000, budget=64, sinks=4, recent=8, heads=48,
              rows=((0, 0), (1, 0), (0, 1))):
    """Positions (rows, heads, n) of what is left of tokens fed one by one, beside sinks and newest.
    draw: Seen -> score. rows: their layer and sequence."""
    pos = torch.full((len(rows), heads, budget + 1), -1)
    record = torch.full((len(rows), heads, tokens), NEVER, dtype=torch.int32)
    nothing = torch.zeros(1, heads, budget + 1, 0)
    for t in range(tokens):
        pos.scatter_(-1, (pos < 0).int().argmax(-1, keepdim=True), t)
        score = torch.cat([draw(Seen(nothing, nothing, pos[i : i + 1], None, t, layer, 0, sequence))
                           for i, (layer, sequence) in enumerate(rows)])
        evict(score, pos, record, t=t, budget=budget, sinks=sinks, recent=recent)
    return pos.sort(-1).values[..., 1 + sinks : -recent]


def chi2_of_age(pos, *, tokens=2000, sinks=4, recent=8, bins=21) -> float:
    edges = np.linspace(sinks, tokens - recent, bins + 1)
    count, _ = np.histogram(pos.numpy(), edges - 0.5)
    want = pos.numel() * np.diff(edges) / (tokens - recent - sinks)
    return float(((count - want) ** 2 / want).sum())


def test_random_is_uniform_in_age_while_decoding():
    """chi2 of 20 degrees of freedom: 20 +- 6.3. Drawing anew at each step must fail."""
    kept = survivors(random)
    assert kept.shape == (3, 48, 52) and chi2_of_age(kept) < 45
    same = (kept.view(144, 1, 52, 1) == kept.view(1, 144, 1, 52)).sum((2, 3)).double()
    same.fill_diagonal_(0)
    assert same.max() < 12 and same.mean() < 2, "another set in each layer, head and sequence"
    draw = torch.Generator().manual_seed(0)
    anew = survivors(lambda seen: torch.rand(seen.pos.shape, generator=draw),
                     rows=((0, 0),))
    assert chi2_of_age(anew) > 1000


def test_random_scores_are_distinct_and_exact():
    score = priorities(4096)[0]
    assert score.dtype == torch.float32 and len(score.unique()) > 4090
    assert torch.equal(score, score.round()) and score.abs().max() <= 2**23


# ---- bad input ----------------------------------------------------------------------------------

BAD = [
    ({"keep": 0.0}, "--keep 0.0: expected a share in (0, 1]; 1 evicts nothing"),
    ({"keep": 1.5}, "--keep 1.5: expected a share in (0, 1]; 1 evicts nothing"),
    ({"budget": 0}, "--budget 0: expected at least 1"),
    ({"evict_every": 0, "budget": 64}, "--evict-every 0: expected at least 1"),
    ({"prefill_chunk": 0}, "--prefill-chunk 0: expected at least 1"),
    ({"recent": 0}, "--recent 0: expected at least 1"),
    ({"window": 0}, "--window 0: expected at least 1"),
    ({"budget": 31}, "--budget 31: smaller than --sinks 4 plus the 32 newest of --recent or "
                     "--window; raise --budget or lower those"),
    ({"budget": 35}, "--budget 35: smaller than --sinks 4 plus the 32 newest"),
    ({"budget": 16, "recent": 13, "window": 8, "policy": "knorm"},
     "--budget 16: smaller than --sinks 4 plus the 13 newest"),
    ({"budget": 12, "recent": 2, "window": 9},
     "--budget 12: smaller than --sinks 4 plus the 9 newest"),
]


@pytest.mark.parametrize("options,says", [
    *BAD,
    ({"keep": -0.5}, "--keep -0.5: expected a share in (0, 1]"),
    ({"keep": nan}, "--keep nan: expected a share in (0, 1]"),
    ({"keep": inf}, "--keep inf: expected a share in (0, 1]"),
    ({"sinks": -1}, "--sinks -1: expected at least 0"),
    ({"budget": -5}, "--budget -5: expected at least 1"),
    ({"policy": "h20"}, "--policy h20: unknown; expected one of " + ", ".join(NAMES)),
    ({"layer_budget": "cone"}, "--layer-budget cone: expected one of uniform, pyramid"),
])
def test_bad_input_is_one_line(options, says):
    with pytest.raises(BadInput) as e:
        Eviction(**options)
    assert str(e.value).startswith(says) and "\n" not in str(e.value)


def flags(options) -> list[str]:
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    return ["--task", "gsm8k", *sum(given, ())]


@pytest.mark.parametrize("options,says", [
    *BAD,
    ({"keep": -0.5}, "--keep -0.5: expected a share in (0, 1]"),
    ({"sinks": -1}, "--sinks -1: expected at least 0"),
    ({"evict_every": 4}, "--evict-every 4: expected --budget B with it"),
])
def test_bad_flags_are_one_line(options, says):
    with pytest.raises(BadInput) as e:
        parse(flags(options), "x")
    assert str(e.value).startswith(says) and "\n" not in str(e.value)


@pytest.mark.parametrize("options,choices", [({"policy": "h20"}, NAMES),
                                             ({"layer_budget": "cone"}, ("uniform", "pyramid"))])
def test_an_unknown_choice_is_answered_with_all(options, choices):
    with pytest.raises(BadInput) as e:
        parse(flags(options), "x")
    for word in (*choices, *options.values(), flags(options)[2]):
        assert word in str(e.value)
    assert "\n" not in str(e.value)


def test_flags_become_the_schedule():
    options = {"policy": "rkv", "keep": 0.75, "budget": 60, "evict_every": 5, "prefill_chunk": 32,
               "layer_budget": "pyramid", "sinks": 3, "recent": 11, "window": 16, "seed": 9}
    assert parse(flags(options), "x").eviction() == Eviction(**options)
    assert parse(flags({}), "x").eviction() == Eviction()
    assert parse(flags({"budget": 64}), "x").eviction() == Eviction(keep=1.0, budget=64)


def test_a_window_that_nobody_reads_refuses_nothing():
    assert Eviction("recent", budget=20, recent=4).floor == 8
    assert Eviction("h2o", budget=16).floor == 5
    assert Eviction("h2o", 0.5).stays(60) == 30, "not the 36 of the others' window"
    with pytest.raises(BadInput):
        Eviction("snapkv", budget=20, recent=4)


def test_defaults():
    e = Eviction()
    assert Eviction(budget=64).keep == 1.0 and Eviction(keep=0.3, budget=64).keep == 0.3
    assert (e.policy, e.keep, e.sinks, e.window, e.seed) == ("snapkv", 0.5, 4, 32, 0)
    assert (e.budget, e.evict_every, e.prefill_chunk, e.layer_budget, e.recent) == (
        None, 128, None, "uniform", None)
    assert eviction.DENSE.stays(1000) == 1000
    assert e.stays(36) == 36 and e.stays(37) == 36 and e.stays(1000) == 500
    with pytest.raises(TypeError):
        Eviction("snapkv", 0.5, 64)  # options have names
