"""Properties of the rollout, its record and the replay, over random schedules, shapes and models.

Hypothesis draws what other tests fix by hand: policy, schedule, prompt and response lengths, stop
tokens, model shape. Each example is checked against references that share no code with the cache
and the learner: whole sequences under a T x T mask filled in key by key, and a simulation of the
schedule in plain integers. Controls show that the same checks reject a record that is one position
off and a broken `evict`. Examples are the same in every run; nothing is stored.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

import eviction
import kvcache
import shadow_mask
from errors import BadInput
from eviction import DENSE, LAYER_BUDGETS, NEVER, POLICIES, Eviction, Seen, evict
from grpo import group_terms
from model import ModelConfig, Qwen
from rollout import Rollout, generate
from shadow_mask import Replay

V = 11  # few tokens: prompts repeat themselves, and rows end at different steps
EXACT, SAME = 1e-9, 1e-12
VISIBLE = 1e-2  # what a wrong mask does to a log-prob
ALL = sorted(POLICIES)
SETTINGS = settings(deadline=None, derandomize=True, print_blob=True, database=None,
                    suppress_health_check=list(HealthCheck))
SEARCH = settings(SETTINGS, max_examples=200, phases=[Phase.generate], report_multiple_bugs=False)
FOLDER = tempfile.TemporaryDirectory()  # else a folder .hypothesis is left behind
set_hypothesis_home_dir(FOLDER.name)


# ---- examples -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One rollout and the row of it that is repeated alone; `seed` also draws the prompts."""

    kind: str
    groups: int  # query heads a KV head
    Hkv: int
    L: int
    prompt_lens: tuple[int, ...]
    G: int
    R: int
    stop_ids: frozenset[int]
    temperature: float
    seed: int
    elements: int  # the largest matrix built at once
    alone: tuple[int, int]
    eviction: Eviction


@st.composite
def evictions(draw, policy: str) -> Eviction:
    """Any schedule that is not refused."""
    sinks = draw(st.integers(0, 5))
    window = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 9, 12]))  # 8 is the most while decoding
    recent = draw(st.none() | st.sampled_from([1, 2, 5, 10]))
    least = least_budget(policy, sinks, recent, window)
    budget = None if draw(st.integers(0, 2)) == 0 else least + draw(st.integers(0, 16))
    return Eviction(policy, draw(st.integers(1, 100)) / 100, budget=budget,
                    evict_every=draw(st.integers(1, 12)), sinks=sinks, recent=recent,
                    prefill_chunk=draw(st.none() | st.integers(1, 24)), window=window,
                    layer_budget=draw(st.sampled_from(LAYER_BUDGETS)),
                    seed=draw(st.integers(0, 2**63)))


@st.composite
def cases(draw, policy: str | None = None) -> Case:
    prompt_lens = tuple(draw(st.lists(st.integers(1, 60), min_size=1, max_size=3)))
    G, e = draw(st.integers(1, 3)), draw(evictions(policy or draw(st.sampled_from(ALL))))
    layers = st.integers(1, 4) if e.layer_budget == "uniform" else st.integers(2, 4)
    return Case(
        kind=draw(st.sampled_from(["qwen2", "qwen3"])), groups=draw(st.sampled_from([1, 2, 7])),
        Hkv=draw(st.integers(1, 2)), L=draw(layers), prompt_lens=prompt_lens, G=G,
        R=draw(st.integers(1, 25)), temperature=draw(st.sampled_from([1.0, 0.7, 1.5])),
        stop_ids=draw(st.frozensets(st.integers(0, V - 1), max_size=2)),
        seed=draw(st.integers(0, 2**31)), elements=draw(st.sampled_from([2**25] * 4 + [3000])),
        alone=(draw(st.integers(0, len(prompt_lens) - 1)), draw(st.integers(0, G - 1))),
        eviction=e)


@cache
def build(kind: str, groups: int, Hkv: int, L: int) -> Qwen:
    """A random model in float64 with attention far from uniform, on which the output depends."""
    hf = {"model_type": kind, "vocab_size": V, "hidden_size": 16, "num_hidden_layers": L,
          "num_attention_heads": Hkv * groups, "num_key_value_heads": Hkv, "head_dim": 4,
          "intermediate_size": 16, "rms_norm_eps": 1e-6, "rope_theta": 100.0,
          "tie_word_embeddings": kind == "qwen3"}
    model = Qwen(ModelConfig.from_hf(hf)).double()
    draw = torch.Generator().manual_seed(L * 100 + groups * 10 + Hkv)
    for name, p in model.named_parameters():
        p.requires_grad_(False)
        noise = torch.randn(p.shape, generator=draw, dtype=p.dtype)
        if p.ndim == 2:
            sharp = 1.6 if kind == "qwen2" and ("q_proj" in name or "k_proj" in name) else 1.0
            p.data = noise * (0.5 if "embed" in name else sharp / p.shape[1] ** 0.5)
        elif "bias" in name:
            p.data = noise * 0.3
        else:  # norms; the gains of q and k sharpen attention
            p.data = (1.5 if "q_norm" in name or "k_norm" in name else 1.0) + 0.2 * noise
    return model


@torch.inference_mode()
def sample(case: Case, *, which: list[int] | None = None, G: int | None = None,
           eviction: Eviction | None = None) -> Rollout:
    """The rollout of a case, or of some of its prompts, of fewer samples, under another cache."""
    draw, which = np.random.default_rng(case.seed), which or range(len(case.prompt_lens))
    prompts = [draw.integers(0, V, P).tolist() for P in case.prompt_lens]
    return generate(build(case.kind, case.groups, case.Hkv, case.L), [prompts[n] for n in which],
                    sequence=[10 + n for n in which], G=G or case.G, max_new=case.R,
                    stop_ids=case.stop_ids, eviction=eviction or case.eviction,
                    temperature=case.temperature, seed=case.seed)


def small_blocks(patch: pytest.MonkeyPatch, elements: int) -> None:
    """Attention, similarities and masks in pieces of at most so many elements."""
    patch.setattr(eviction, "ELEMENTS", elements)
    patch.setattr(kvcache, "ELEMENTS", elements)
    patch.setattr(shadow_mask, "MASK_ELEMENTS", elements)


# ---- the schedule, in plain integers ------------------------------------------------------------


def voters(policy: str, window: int) -> int:
    """Of how many last queries the policy reads the attention."""
    return {"snapkv": window, "rkv": min(8, window), "tova": 1}.get(policy, 0)


def least_budget(policy: str, sinks: int, recent: int | None, window: int) -> int:
    """Sinks, newest keys and voting queries have their place."""
    if recent is None:  # h2o's share of the newest grows with the budget
        recent = 1 if policy == "h2o" else window
    return sinks + max(recent, voters(policy, window))


def newest_kept(e: Eviction, budget: int, *, decoding: bool) -> int:
    """How many of the newest keys no eviction down to `budget` may take."""
    window = min(e.window, 8) if decoding else e.window
    newest = window
    if e.policy == "h2o":  # half of the budget, but the sinks come first
        newest = min(budget // 2, budget - e.sinks)
    return max(1, newest if e.recent is None else e.recent, voters(e.policy, window))


def of_layer(e: Eviction, mean: int, most: int, layer: int, L: int) -> int:
    """A layer's share of L * mean: with `pyramid` it falls linearly from mean + tip to mean - tip,
    with tip = mean / 2 unless a layer would get less than the least budget or more than `most`."""
    if e.layer_budget == "uniform" or L == 1:
        return mean
    least = least_budget(e.policy, e.sinks, e.recent, e.window)
    tip = max(0, min(mean // 2, most - mean, mean - least))
    return mean + math.trunc(tip * (1 - Fraction(2 * layer, L - 1)))


def budgets(e: Eviction, L: int) -> list[int | None]:
    """B of each layer."""
    if e.budget is None:
        return [None] * L
    return [of_layer(e, e.budget, 2 * e.budget, layer, L) for layer in range(L)]


def prompt_keys(e: Eviction, P: int, L: int) -> list[int]:
    """How many of a prompt's P keys are left in each layer when prefill ends. `keep` is meant as
    the percentage that the user wrote, and rounded to the nearest."""
    wanted = math.floor(Fraction(round(e.keep * 100), 100) * P + Fraction(1, 2))
    mean = min(P, max(wanted, least_budget(e.policy, e.sinks, e.recent, e.window)))
    stays = [of_layer(e, mean, P, layer, L) for layer in range(L)]
    for layer, B in enumerate(budgets(e, L)):
        if B is not None and stays[layer] >= B + (1 if e.prefill_chunk else e.evict_every):
            stays[layer] = B
    return stays


class Plan:
    """When a row of one layer loses how many keys.

    prompt: keys that stay of the prompt. B: what decoding cuts a row back to. K: so much of the
    prompt passes at a time. gone, live: after the query at t, so many keys of each head go, and so
    many are left.
    """

    def __init__(self, case: Case, P: int, length: int, layer: int):
        e, stays = case.eviction, prompt_keys(case.eviction, P, case.L)
        self.prompt, self.B = stays[layer], budgets(e, case.L)[layer]
        # A prompt within the budget of every layer is not cut into chunks.
        self.K = e.prefill_chunk if e.prefill_chunk and P > min(stays) else P
        self.gone, self.live, live = {}, {}, 0
        for i in range(P):  # prefill: evict after each chunk
            live += 1
            if ((i + 1) % self.K == 0 or i + 1 == P) and live > self.prompt:
                self.gone[i], live = live - self.prompt, self.prompt
                self.live[i] = live
        for i in range(P, P + length - 1):  # the last token is never fed back
            live += 1
            if self.B is not None and live == self.B + e.evict_every:
                self.gone[i], live = live - self.B, self.B
                self.live[i] = live


# ---- the checks ---------------------------------------------------------------------------------


def check_lengths(case: Case, roll: Rollout) -> None:
    """A row ends with its first stop token, else at R."""
    for row, length, stopped in zip(roll.tokens.flatten(0, 1).tolist(), roll.lengths.flatten(),
                                    roll.stopped.flatten(), strict=True):
        stop = next((i for i, token in enumerate(row) if token in case.stop_ids), None)
        assert stopped == (stop is not None)
        assert length == (stop + 1 if stopped else case.R)


def check_record(case: Case, roll: Rollout) -> None:
    """The record by itself: what it may hold, and that it follows the schedule."""
    e = case.eviction
    for n, P in enumerate(case.prompt_lens):
        record, T = roll.evict_at[n].long(), P + case.R
        assert record.shape == (case.L, case.G, case.Hkv, T)
        j = torch.arange(T)
        assert (record > j).all(), "evicted before it was written"
        assert (record[..., : e.sinks] == NEVER).all(), "a sink was evicted"
        prefill = record[..., :P].clamp(max=P + 1)  # P + 1: while decoding, or never
        assert (prefill == prefill[:, :1]).all(), "one prefill a group"
        if e.policy == "tova":
            assert (record == record[:, :, :1]).all(), "one set a layer"
        for g in range(case.G):
            length = int(roll.lengths[n, g])
            last = P + length - 2  # query; the last token is never fed back
            assert (record[:, g, :, last + 1 :] == NEVER).all(), "evicted but never written"
            for layer in range(case.L):
                plan, rows = Plan(case, P, length, layer), record[layer, g]  # (Hkv, T)
                for row in rows.tolist():
                    count = Counter(end - 1 for end in row if end != NEVER)
                    assert count == plan.gone, ("schedule", n, g, layer, count, plan.gone)
                i = torch.arange(last + 1)[:, None]
                seen = ((j <= i) & (i < rows[:, None])).sum(-1)  # (Hkv, last + 1)
                assert (seen[:, :P] <= (P if plan.K >= P else plan.prompt + plan.K)).all()
                if plan.B is None:
                    grown = plan.prompt + torch.arange(1, length)
                    assert (seen[:, P:] == grown).all(), "keep only: grows by one"
                else:
                    assert (seen[:, P:] <= plan.B + e.evict_every).all(), "more than B + N"
                for t, live in plan.live.items():
                    assert live == (plan.prompt if t < P else plan.B)
                    left = ((j <= t) & (rows > t + 1)).sum(-1)
                    assert (left == live).all(), "not cut back to the budget"
                    newest = newest_kept(e, live, decoding=t >= P)
                    taken = (rows == t + 1).nonzero()[:, 1].max()
                    assert taken <= t - newest, "newest key evicted"


def attention(q: torch.Tensor, k: torch.Tensor, record: torch.Tensor) -> torch.Tensor:
    """Probabilities (n, Hq, T, T) of whole sequences, q (n, Hq, T, D), under one layer's record
    (n, Hkv, T): plain, with a mask filled in key by key."""
    T, groups = k.shape[2], q.shape[1] // k.shape[1]
    seen = np.zeros((*record.shape, T), dtype=bool)  # (n, Hkv, key, query)
    for at in np.ndindex(record.shape):
        seen[(*at, slice(at[-1], int(record[at])))] = True
    hidden = ~torch.from_numpy(seen).mT
    k, hidden = (x.repeat_interleave(groups, dim=1) for x in (k, hidden))
    z = q @ k.mT / q.shape[-1] ** 0.5
    return z.masked_fill(hidden, -torch.inf).softmax(-1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, record: torch.Tensor) -> torch.Tensor:
    return attention(q, k, record) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def oracle(model: Qwen, prompt: torch.Tensor, tokens: torch.Tensor, record: torch.Tensor,
           temperature: float, qk: list | None = None) -> torch.Tensor:
    """(n, R) log-probs of n samples' tokens (n, R) under the record (L, n, Hkv, T); each layer's
    queries and keys are appended to `qk`."""
    def plain(layer, q, k, v):
        if qk is not None:
            qk.append((q, k))
        return attend(q, k, v, record[layer])

    (n, R), P = tokens.shape, len(prompt)
    ids, pos = torch.cat((prompt.repeat(n, 1), tokens), dim=1), torch.arange(P + R).repeat(n, 1)
    h = model(ids, pos, plain)
    logp = (model.logits(h)[:, P - 1 : -1] / temperature).log_softmax(-1)
    return logp.gather(-1, tokens[..., None])[..., 0]


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = (a - b).detach().abs()
    assert torch.isfinite(difference).all()
    return float(difference.max()) if difference.numel() else 0.0


@torch.inference_mode()
def differences(case: Case, roll: Rollout) -> tuple[float, float]:
    """Largest |log-prob - sampler's| of the packed learner and of the oracle, on active tokens."""
    model, learner, slow = build(case.kind, case.groups, case.Hkv, case.L), [], []
    for n, P in enumerate(case.prompt_lens):
        logp, *_, mask = group_terms(model, roll, n, slice(0, case.G), distil=False,
                                     temperature=case.temperature)
        R = int(roll.lengths[n].max())
        active = torch.arange(R) < roll.lengths[n, :, None]
        assert torch.equal(mask, active)
        sampled = roll.logp[n, :, :R][active]
        learner.append(worst(logp, sampled))
        logp = oracle(model, roll.prompts[n], roll.tokens[n, :, :R],
                      roll.evict_at[n][..., : P + R], case.temperature)
        slow.append(worst(logp[active], sampled))
    return max(learner), max(slow)


def check_logp(case: Case, roll: Rollout) -> None:
    assert max(differences(case, roll)) <= EXACT


def losers(score: list[float], pos: list[int], *, t: int, budget: int, sinks: int,
           recent: int) -> list[int]:
    """The slots of one head that lose their key, by sorting."""
    ranked = []
    for slot, p in enumerate(pos):
        value = -math.inf if math.isnan(score[slot]) else float(np.float32(score[slot]))
        if p >= 0:  # ties go to the newer
            ranked.append((p < sinks or p > t - recent, value, p, slot))
    return [slot for *_, slot in sorted(ranked, reverse=True)[budget:]]


@torch.inference_mode()
def check_decisions(case: Case, roll: Rollout) -> None:
    """Of a group's last sample: the keys that went are those that the policy scores lowest, if it
    is shown what the oracle saw, in the order of positions."""
    n, g, e, qk = case.alone[0], case.G - 1, case.eviction, []
    P, length, policy = case.prompt_lens[n], int(roll.lengths[n, g]), POLICIES[e.policy]
    record = roll.evict_at[n][:, [g], :, : P + length]
    oracle(build(case.kind, case.groups, case.Hkv, case.L), roll.prompts[n],
           roll.tokens[n, [g], :length], record, 1.0, qk)
    for layer, (q, k) in enumerate(qk):
        p = attention(q, k, record[layer]).unflatten(1, (case.Hkv, case.groups)).mean(2)
        for t, live in Plan(case, P, length, layer).live.items():
            now, decoding = slice(t + 1), t >= P
            votes = voters(e.policy, min(e.window, 8) if decoding else e.window)
            j = torch.arange(t + 1)
            pos = torch.where(record[layer, ..., now] > t, j, -1)  # (1, Hkv, t + 1)
            mass = p[:, :, now, now].sum(2)  # from all queries so far
            score = policy.score(Seen(q[:, :, t + 1 - votes : t + 1], k[:, :, now], pos, mass, t,
                                      layer, e.seed, 10 + n))
            for h in range(case.Hkv):
                gone = losers(score[0, h].tolist(), pos[0, h].tolist(), t=t, budget=live,
                              sinks=e.sinks, recent=newest_kept(e, live, decoding=decoding))
                assert sorted(gone) == j[record[layer, 0, h, now] == t + 1].tolist(), "other keys"


def check_same_rows(a: Rollout, n: int, b: Rollout, m: int, rows: list[int]) -> None:
    """Rows of group n of `a` are those of group m of `b`."""
    for name in ("tokens", "lengths", "stopped"):
        assert torch.equal(getattr(a, name)[n, rows], getattr(b, name)[m, rows]), name
    assert torch.equal(a.evict_at[n][:, rows], b.evict_at[m][:, rows]), "record"
    assert worst(a.logp[n, rows], b.logp[m, rows]) <= SAME


def check_alone(case: Case, roll: Rollout) -> None:
    """One row does not depend on what else is in the batch."""
    n, g = case.alone
    if (len(case.prompt_lens), case.G) != (1, g + 1):  # else nothing else is in the batch
        check_same_rows(roll, n, sample(case, which=[n], G=g + 1), 0, list(range(g + 1)))


def check_untouched(case: Case, roll: Rollout) -> int:
    """Rows that lost nothing are those of a full cache. Returns how many there were."""
    rows = [[g for g in range(case.G) if (x[:, g] == NEVER).all()] for x in roll.evict_at]
    if which := [n for n, some in enumerate(rows) if some]:
        dense = sample(case, which=which, eviction=DENSE)
        for m, n in enumerate(which):
            check_same_rows(roll, n, dense, m, rows[n])
    return sum(map(len, rows))


# ---- the rollout and its learner ----------------------------------------------------------------


@pytest.mark.parametrize("policy", ALL)
def test_rollout_record_and_replay_agree(policy):
    found = Counter()

    @seed(ALL.index(policy))
    @settings(SETTINGS, max_examples=63)
    @given(cases(policy))
    def examples(case):
        with pytest.MonkeyPatch.context() as patch:
            small_blocks(patch, case.elements)
            roll = sample(case)
            check_lengths(case, roll)
            check_record(case, roll)
            check_logp(case, roll)
            check_decisions(case, roll)
            check_alone(case, roll)
            found["untouched rows"] += check_untouched(case, roll)
        for P, lengths, record in zip(case.prompt_lens, roll.lengths, roll.evict_at, strict=True):
            found["between chunks"] += bool((record < P).any())
            found["after prefill"] += bool((record == P).any())
            found["while decoding"] += bool(((record > P) & (record != NEVER)).any())
            found["ends apart"] += len(lengths.unique()) > 1
            found["layers unlike"] += len({int((x != NEVER).sum()) for x in record}) > 1

    examples()
    assert len(found) == 6 and all(found.values()), ("examples not worth testing", found)


@settings(SETTINGS, max_examples=300)
@given(policy=st.sampled_from(ALL), keep=st.floats(-0.5, 1.5),
       budget=st.none() | st.integers(-1, 20), sinks=st.integers(-1, 8),
       recent=st.none() | st.integers(-1, 12), window=st.integers(-1, 12),
       every=st.integers(-1, 3), chunk=st.none() | st.integers(-1, 3))
def test_refusals_are_right(policy, keep, budget, sinks, recent, window, every, chunk):
    least = least_budget(policy, sinks, recent, window)
    refused = (not 0 < keep <= 1 or sinks < 0 or window < 1 or every < 1
               or any(x is not None and x < 1 for x in (budget, recent, chunk))
               or (budget is not None and budget < least))
    try:
        Eviction(policy, keep, budget=budget, evict_every=every, prefill_chunk=chunk, sinks=sinks,
                 recent=recent, window=window)
    except BadInput:
        assert refused
    else:
        assert not refused


@settings(SETTINGS, max_examples=200)
@given(e=st.sampled_from(ALL).flatmap(evictions), L=st.integers(1, 9), first=st.integers(1, 3000))
@example(e=Eviction("recent", 0.7, window=1), L=1, first=45)  # 0.7 * 45 is 31.499999999999996
def test_how_many_stay(e, L, first):
    for P in range(first, first + 40):
        stays = prompt_keys(e, P, L)
        assert [e.stays(P, layer, L) for layer in range(L)] == stays
        if e.budget is None:  # a pyramid gives to a layer what it takes from another
            assert sum(stays) == sum(prompt_keys(replace(e, layer_budget="uniform"), P, L))
    if e.budget is not None:
        assert [e.row_budget(layer, L) for layer in range(L)] == budgets(e, L)


# ---- evict alone --------------------------------------------------------------------------------

SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38]


@st.composite
def held_keys(draw) -> dict:
    """Arguments of `evict`: any scores, slots in any order, free ones among them."""
    B, Hkv, S = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 12))
    t = draw(st.integers(S - 1, S + 12))
    floats = st.sampled_from(SPECIAL) | st.sampled_from([1.0, 2.0]) | st.floats(width=32)
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    some = draw(st.lists(floats, min_size=1, max_size=S))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    score = torch.tensor(random.choice(some, (B, Hkv, S)), dtype=dtype)
    pos = np.argsort(random.random((B, Hkv, t + 1)), axis=-1)[..., :S]
    pos[random.random(pos.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -1
    sinks, recent = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    return {"score": score, "pos": torch.from_numpy(pos), "t": t, "sinks": sinks, "recent": recent,
            "budget": sinks + recent + draw(st.integers(0, S)),
            "rows": draw(st.none() | st.lists(st.booleans(), min_size=B, max_size=B))}


@settings(SETTINGS, max_examples=300)
@given(held_keys())
def test_evict_is_a_slow_sort(call):
    rows, score, pos, t = call.pop("rows"), call["score"], call["pos"], call["t"]
    record = torch.full((*pos.shape[:2], t + 3), NEVER, dtype=torch.int32)
    for b, h in np.ndindex(pos.shape[:2]):
        for j in set(range(t)) - set(pos[b, h].tolist()):
            record[b, h, j] = j + 1  # gone before
    want_pos, want = pos.clone(), record.clone()
    for b, h in np.ndindex(pos.shape[:2]):
        if rows is not None and not rows[b]:
            continue
        for slot in losers(score[b, h].tolist(), pos[b, h].tolist(), t=t, budget=call["budget"],
                           sinks=call["sinks"], recent=call["recent"]):
            want[b, h, pos[b, h, slot]] = t + 1
            want_pos[b, h, slot] = -1
    evict(**call, evict_at=record, rows=None if rows is None else torch.tensor(rows))
    assert torch.equal(pos, want_pos)
    assert torch.equal(record, want)


# ---- replay alone -------------------------------------------------------------------------------


@st.composite
def records(draw) -> dict:
    """Any record that a group can have: prompts lose keys together before P, each sample and head
    for itself after it."""
    P, R, G, Hkv = (draw(st.integers(1, most)) for most in (20, 12, 3, 2))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    j = np.arange(P + R)

    def evicted(shape: tuple[int, ...]) -> np.ndarray:
        """Keys live for a time around a mean, or forever."""
        life = random.geometric(1 / draw(st.sampled_from([1, 3, 10, 30])), shape)
        forever = random.random(shape) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
        return np.where(forever, NEVER, j[: shape[-1]] + life)

    before = evicted((1, Hkv, P))  # in prefill, the same for all samples
    after = np.maximum(evicted((G, Hkv, P + R)), np.maximum(P, j) + 1)  # while decoding
    record = after.copy()
    record[..., :P] = np.where(before <= P, before, after[..., :P])
    return {"record": torch.from_numpy(record).to(torch.int32), "P": P,
            "groups": draw(st.sampled_from([1, 2, 7])), "rows": draw(st.integers(1, 14)),
            "elements": draw(st.integers(1, 2 * G * Hkv * (P + R) ** 2)),
            "seed": draw(st.integers(0, 2**32))}


@settings(SETTINGS, max_examples=200)
@given(records())
def test_replay_is_plain_masked_attention(drawn):
    record, P, groups = drawn["record"], drawn["P"], drawn["groups"]
    (G, Hkv, T), D = record.shape, 4
    R, draw = T - P, torch.Generator().manual_seed(drawn["seed"])
    q, k, v, weight = (torch.randn(1, Hkv * x, P + G * R, D, generator=draw, dtype=torch.float64)
                       for x in (groups, 1, 1, groups))
    inputs = q, k, v = (q * 2).requires_grad_(), k.requires_grad_(), v.requires_grad_()

    # Sample g as a sequence of its own: the prompt, then its responses.
    at = [[*range(P), *range(P + g * R, P + (g + 1) * R)] for g in range(G)]
    every = attend(*(x[0, :, at].transpose(0, 1) for x in inputs), record)
    slow = torch.cat([every[0, :, :P], *every[:, :, P:]], dim=1)[None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shadow_mask, "ROWS", drawn["rows"])
        patch.setattr(shadow_mask, "MASK_ELEMENTS", drawn["elements"])
        replay = Replay(record[None], P)
        o = replay(0, q, k, v)
        alone = Replay(record[None], P, prompt_kv=replay.prompt_kv)(
            0, *(x[:, :, P:] for x in inputs))
        assert replay.dense_prompt == bool((record[..., :P] >= P).all())
        assert worst(o, slow) <= SAME and worst(alone, slow[:, :, P:]) <= SAME
        fast = torch.autograd.grad((o * weight).sum(), inputs)
    for a, b in zip(fast, torch.autograd.grad((slow * weight).sum(), inputs), strict=True):
        assert worst(a, b) <= 1e-11


# ---- controls: the checks can fail --------------------------------------------------------------


def felt(case: Case, roll: Rollout) -> bool:
    """A response's query came after an eviction. One between chunks alone need not matter: what the
    last layer computes for the rows of a prompt is not used."""
    for P, length, record in zip(case.prompt_lens, roll.lengths, roll.evict_at, strict=True):
        last = (P + length - 2)[:, None, None]  # the last token is never fed back
        if ((record >= P) & (record <= last)).any():
            return True
    return False


def test_a_wrong_record_is_rejected():
    """By the checks of the record and of the log-probs, each by itself; what the latter see is no
    rounding."""
    by = {"one late": 1, "one early": -1, "dense": 10**6}
    seen = {wrong: [] for wrong in by}

    @settings(SEARCH, max_examples=30)
    @given(cases())
    def examples(case):
        # The learner refuses a group of which one sample lost a key in prefill and another not,
        # as "one early" makes it seem.
        case = replace(case, G=1)
        roll = sample(case)
        assume(felt(case, roll))
        for wrong in seen:
            moved = [torch.where(x == NEVER, NEVER, x + by[wrong]) for x in roll.evict_at]
            bad = replace(roll, evict_at=moved)
            with pytest.raises(AssertionError):
                check_record(case, bad)
            found = differences(case, bad)
            assert min(found) > EXACT
            seen[wrong].append(min(found))

    examples()
    assert all(len(x) == 30 and np.median(x) > VISIBLE for x in seen.values()), seen


def broken(**change):
    """`evict` with an argument changed."""
    def wrong(score, pos, evict_at, **options):
        changed = {name: value(options) for name, value in change.items()}
        evict(score, pos, evict_at, **{**options, **changed})
    return wrong


def one_more_while_decoding(options: dict) -> int:
    return options["budget"] + (options["rows"] is not None)


def of_another_head(score, pos, evict_at, **options):
    evict(score, pos, evict_at, **options)
    evict_at.copy_(evict_at.roll(1, dims=1))


def of_the_lowest(score, pos, evict_at, **options):
    evict(-score, pos, evict_at, **options)


BROKEN = {
    "keeps one too many": (broken(budget=one_more_while_decoding), check_record),
    "keeps one too few": (broken(budget=lambda x: x["budget"] - 1), check_record),
    "forgets the newest": (broken(recent=lambda x: 0), check_record),
    "one too few of the newest": (broken(recent=lambda x: x["recent"] - 1), check_record),
    "forgets the sinks": (broken(sinks=lambda x: 0), check_record),
    "records one late": (broken(t=lambda x: x["t"] + 1), check_record),
    "evicts rows that are not due": (broken(rows=lambda x: None), check_record),
    "records another head": (of_another_head, check_logp),
    "keeps the lowest": (of_the_lowest, check_decisions),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_evict_is_found(name, monkeypatch):
    wrong, check = BROKEN[name]
    monkeypatch.setattr(kvcache, "evict", wrong)

    @SEARCH
    @given(cases())
    def examples(case):
        assume(case.eviction.budget is not None and case.G > 1)
        try:
            roll = sample(case)
        except (AssertionError, RuntimeError):
            reject()  # the cache noticed, but here the check is to
        check(case, roll)

    with pytest.raises(AssertionError):
        examples()
