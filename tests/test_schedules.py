"""Eviction while decoding, prefill in chunks, layers of unlike budgets: what the record must say.

The sampler's log-probs, the packed learner's and the slow oracle's agree under every policy and
schedule; what the cache held at each step is what the record says was visible; a row is cut when
its own live keys reach B + N and at no other step, whatever else is in the batch.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from oracle import (
    CONTROL,
    EMBEDDED,
    V,
    apart,
    build,
    differs,
    embedded_prompts,
    gradients,
    later,
    learner,
    make_prompts,
    oracle,
    oracle_rows,
    permute,
    worst,
)

import kvcache
import rollout
import shadow_mask
from eviction import NEVER, POLICIES, Eviction, Policy
from grpo import group_terms
from kvcache import KVCache, Slots
from model import Qwen, load_model
from rollout import Rollout, generate
from shadow_mask import dense_record

LENGTHS = (28, 36, 70)  # within the budget; below the trigger of "every 8"; above it
G, R = 3, 18
STOPS = frozenset((3, 8, 17, 30))
SCHEDULES = {
    "keep": {"keep": 0.5},
    "every 1": {"budget": 32, "evict_every": 1},
    "every 8": {"budget": 32, "evict_every": 8},
    "chunks": {"budget": 32, "evict_every": 8, "prefill_chunk": 16},
    "pyramid keep": {"keep": 0.5, "layer_budget": "pyramid"},
    "pyramid": {"budget": 32, "evict_every": 4, "prefill_chunk": 16, "layer_budget": "pyramid"},
}
# Written out: B of each of the 3 layers, and how many keys of each prompt are left by prefill.
BUDGETS = dict.fromkeys(SCHEDULES, (32, 32, 32)) | {"pyramid": (48, 32, 16)}
LEFT = {
    "keep": ((14,) * 3, (18,) * 3, (35,) * 3),
    "every 1": ((28,) * 3, (32,) * 3, (32,) * 3),
    "every 8": ((28,) * 3, (36,) * 3, (32,) * 3),
    "chunks": ((28,) * 3, (32,) * 3, (32,) * 3),
    "pyramid keep": ((16, 14, 12), (24, 18, 12), (52, 35, 18)),
    "pyramid": ((28, 28, 16), (36, 32, 16), (48, 32, 16)),
}
# h2o's newest are half of whatever the budget is, so that no layer needs its window.
LEFT_H2O = LEFT | {"pyramid keep": ((21, 14, 7), (27, 18, 9), (52, 35, 18))}


def schedule(policy: str, name: str, **options) -> Eviction:
    return Eviction(policy, **{"keep": 1.0, "sinks": 4, "window": 8, "seed": 1, **SCHEDULES[name],
                               **options})


def sample(model: Qwen, prompts: list[list[int]], eviction: Eviction, **options) -> Rollout:
    options = {"G": G, "max_new": R, "stop_ids": frozenset(), "sequence": range(len(prompts)),
               "seed": 3, **options}
    return generate(model, prompts, eviction=eviction, **options)


class Watched(KVCache):
    """Notes, for each query position and layer, which positions a row's heads held."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.columns = max(self.prompt_lens) + self.R
        self.prefilled = []  # n, layer, chunk, slots while it passed, positions after it
        self.attended = []  # step, running, layer, (B, Hkv, T) bool when attending, and after it
        self.seen = None  # own positions when attending

    def positions(self, pos: torch.Tensor) -> torch.Tensor:
        """(.., S) positions, -1 = free, to (.., T) bool."""
        held = torch.zeros(*pos.shape[:-1], self.columns + 1, dtype=torch.int64)
        held.scatter_add_(-1, pos.masked_fill(pos < 0, self.columns), torch.ones_like(pos))
        assert (held[..., :-1] <= 1).all(), "a position in two slots"
        return held[..., :-1] > 0

    def held(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        live = self.positions(own)
        for n, prompt in enumerate(self.prompts):
            live[n * self.G : (n + 1) * self.G] |= self.positions(prompt[layer].pos)
        return live

    def prefill(self, n, chunk):
        attend = super().prefill(n, chunk)

        def watched(layer, q, k, v):
            slots = self.prompts[n][layer] if chunk.start else None
            o = attend(layer, q, k, v)
            after = self.prompts[n][layer]
            slots = slots or after
            self.prefilled.append((n, layer, chunk, slots.k.shape[2], self.positions(after.pos[0])))
            return o
        return watched

    def decode(self, pos, running):
        attend, step = super().decode(pos, running), self.steps - 1

        def watched(layer, q, k, v):
            o = attend(layer, q, k, v)
            self.attended.append((step, running.clone(), layer, self.held(layer, self.seen),
                                  self.held(layer, self.own[layer].pos)))
            return o
        return watched


@pytest.fixture
def watch(monkeypatch):
    """The caches that `generate` makes."""
    made, attend = [], Slots.attend

    def spy(self, q, pos, prompts=()):
        if made:
            made[-1].seen = self.pos.clone()
        return attend(self, q, pos, prompts)

    def make(*args, **options):
        made.append(Watched(*args, **options))
        return made[-1]

    monkeypatch.setattr(Slots, "attend", spy)
    monkeypatch.setattr(rollout, "KVCache", make)
    return made


# ---- sampler = learner = oracle -----------------------------------------------------------------


def compare(model: Qwen, roll: Rollout, temperature: float = 1.0, *,
            controls: bool = False) -> dict[str, float]:
    """Assert the contract for each prompt, and that a dense learner breaks it wherever a key was
    evicted. Returns the largest difference of each wrong record; `controls`: of all of them."""
    found = dict.fromkeys(("dense", "one late", "one early", "dense prompt rows"), 0.0)
    for n, record in enumerate(roll.evict_at):
        P, by = len(roll.prompts[n]), partial(differs, model, roll, n, temperature=temperature)
        with torch.no_grad():
            assert by(learner, record) <= 1e-9
            assert by(oracle, record) <= 1e-9
            if (record == NEVER).all():
                assert by(learner, dense_record(record)) <= 1e-9
                continue
            dense = by(learner, dense_record(record))
            assert dense > CONTROL, (P, dense)
            wrong = {"dense": dense}
            if controls:
                wrong["one late"] = by(learner, later(record, 1))
                wrong["one early"] = by(learner, later(record, -1))
            if controls and (record < P).any():
                rows = torch.cat((record[..., :P].clamp(min=P), record[..., P:]), dim=-1)
                wrong["dense prompt rows"] = by(learner, rows)
        for name, value in wrong.items():
            found[name] = max(found[name], value)
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_and_schedule_is_exact(policy, name):
    for groups in (1, 2, 7):
        model = build("qwen3" if groups < 7 else "qwen2", groups)
        roll = sample(model, make_prompts(LENGTHS), schedule(policy, name))
        for record in roll.evict_at:
            assert (record != NEVER).any(), "every prompt should lose keys"
        found = compare(model, roll, controls=groups == 2)
        if groups == 2:
            rows = found.pop("dense prompt rows")
            assert all(x > CONTROL for x in found.values()), found
            assert rows > CONTROL if "prefill_chunk" in SCHEDULES[name] else rows == 0


@pytest.mark.parametrize("policy,name", [("snapkv", "chunks"), ("h2o", "pyramid"),
                                         ("rkv", "every 8"), ("tova", "every 1")])
def test_the_trained_model_is_exact(policy, name):
    """At temperature 2: where it is certain of a token, the log-prob is 0 under any mask."""
    full = embedded_prompts(2)
    model = load_model(EMBEDDED, dtype=torch.float64)
    roll = sample(model, [full[0][-28:], full[1][-90:]], schedule(policy, name), temperature=2.0)
    compare(model, roll, temperature=2.0)


# ---- what is held, and when it is cut -----------------------------------------------------------


def due_steps(left: int, B: int, N: int, steps: int) -> list[int]:
    """At which steps a row of `left` keys is cut, if each step adds one."""
    live, due = left, []
    for step in range(steps):
        live += 1
        if live == B + N:
            due.append(step)
            live = B
    return due


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "random"])
def test_live_keys_are_the_recorded_ones_and_cut_when_due(policy, name, watch):
    """Stop tokens end rows at different steps; a finished row is held to the same record."""
    model, e = build("qwen3"), schedule(policy, name)
    left = LEFT_H2O if policy == "h2o" else LEFT
    roll = sample(model, make_prompts(LENGTHS), e, stop_ids=STOPS)
    (cache,), j = watch, torch.arange(watch[0].columns)
    assert not roll.stopped.all() and len(roll.lengths.unique()) >= 3
    padded = torch.full((3, *roll.evict_at[0].shape[:3], cache.columns), NEVER)  # (N, L, G, Hkv, T)
    for n, record in enumerate(roll.evict_at):
        padded[n, ..., : record.shape[-1]] = record
        assert (record > torch.arange(record.shape[-1])).all(), "evicted before it was written"

    # Prefill: after each chunk what is left is within the layer's share, and is what is recorded.
    for n, layer, chunk, slots, live in cache.prefilled:
        record, stays, P = padded[n, layer, 0], left[name][n][layer], LENGTHS[n]
        expected = (j < chunk.stop) & (record > chunk.stop)
        assert torch.equal(live, expected) and (live.sum(-1) == min(stays, chunk.stop)).all()
        K = e.prefill_chunk if e.prefill_chunk and P > min(left[name][n]) else P
        assert chunk.start % K == 0 and chunk.stop == min(P, chunk.start + K)
        if chunk.start:
            assert slots == min(P, stays + K), "no room for more than stays + K"

    # Decoding: what was attended to, and what was held after the step.
    steps, seen = 0, set()
    for step, running, layer, before, after in cache.attended:
        steps = max(steps, step + 1)
        for b in range(len(running)):
            n, g, length = b // G, b % G, int(roll.lengths[b // G, b % G])
            assert running[b] == (step < length - 1), "the last token is not fed"
            i, record = LENGTHS[n] + min(step, length - 2), padded[n, layer, g]
            if running[b]:
                assert torch.equal(before[b], (j <= i) & (i < record))
                seen.add((b, layer, step))
            assert torch.equal(after[b], (j <= i) & (i + 1 < record))
            if e.budget is not None:
                B, N = BUDGETS[name][layer], e.evict_every
                assert (before[b].sum(-1) <= B + N).all() and (after[b].sum(-1) < B + N).all()
    assert steps == R - 1 and len(seen) == 3 * int((roll.lengths - 1).sum())

    # The record: each row is cut at its own steps, in each head to B; a finished one never again.
    when = set()
    for n, P in enumerate(LENGTHS):
        for layer in range(3):
            B, N = BUDGETS[name][layer], e.evict_every
            for g in range(G):
                fed = int(roll.lengths[n, g]) - 1  # the last token is never a query
                due = due_steps(left[name][n][layer], B, N, fed) if e.budget else []
                expected = {P + step + 1: N for step in due}
                when |= {(n, step) for step in due}
                for row in padded[n, layer, g]:
                    at = row[row != NEVER]
                    assert (at <= P + fed).all()
                    assert (row[P + fed :] == NEVER).all(), "a position that was never a key"
                    after = at[at > P].unique(return_counts=True)
                    assert dict(zip(*(x.tolist() for x in after), strict=True)) == expected
                    assert (at <= P).sum() == P - left[name][n][layer]
    if e.budget and e.evict_every > 1:
        assert len({step for _, step in when}) >= 2, "rows should be due at different steps"


def test_finished_rows_stop(watch):
    """Each row, record and slots, is as in a run in which nothing stops, cut off at its end."""
    model = build("qwen3")
    for policy, name in (("h2o", "every 1"), ("snapkv", "every 8"), ("tova", "pyramid")):
        e, prompts = schedule(policy, name), make_prompts(LENGTHS)
        free = sample(model, prompts, e)
        roll = sample(model, prompts, e, stop_ids=STOPS)
        cache, ends = watch[-1], set()
        for n, P in enumerate(LENGTHS):
            for g in range(G):
                length, b = int(roll.lengths[n, g]), n * G + g
                ends.add(length)
                assert torch.equal(roll.tokens[n, g, :length], free.tokens[n, g, :length])
                assert worst(roll.logp[n, g, :length], free.logp[n, g, :length]) <= 1e-12
                last = P + length - 2  # the last query: the last token is not fed
                record = free.evict_at[n][:, g]
                record = torch.where(record <= last + 1, record, NEVER)
                assert torch.equal(roll.evict_at[n][:, g], record)
                for layer in range(3):
                    j = torch.arange(P + R)
                    live = cache.positions(cache.own[layer].pos[b])[:, : P + R]
                    assert torch.equal(live, (j <= last) & (record[layer] == NEVER))
        assert len(ends) >= 4
        assert any((free.evict_at[n] != roll.evict_at[n]).any() for n in range(3))


# ---- rows are independent -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["every 8", "pyramid"])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_do_not_depend_on_the_batch(policy, name):
    model, prompts, e = build("qwen3"), make_prompts((28, 36, 70, 45)), schedule(policy, name)
    options = {"stop_ids": STOPS, "max_new": 14}
    whole = sample(model, prompts, e, **options)
    other = make_prompts((60,))[0]
    for part, samples in (([2, 0, 3, 1], G), ([1], 1), ([2], 2), ([3, None, 0], G)):
        some = sample(model, [other if n is None else prompts[n] for n in part], e, G=samples,
                      sequence=[9 if n is None else n for n in part], **options)
        for i, n in enumerate(part):
            if n is not None:
                assert torch.equal(some.evict_at[i], whole.evict_at[n][:, :samples])
                assert torch.equal(some.tokens[i], whole.tokens[n, :samples])
                assert worst(some.logp[i], whole.logp[n, :samples]) <= 1e-12


def drive(model: Qwen, prompts: list[list[int]], e: Eviction, steps: int, *, at=None, seed=0,
          kind=KVCache):
    """A cache after `steps` given tokens, and their hidden states (steps, B, C). At step `at` the
    slots that were written are permuted, in every row and head differently; for tova, whose heads
    must agree, the same in all heads."""
    cache = kind(model.cfg, [len(p) for p in prompts], G, steps + 1, eviction=e,
                    sequence=range(len(prompts)), dtype=model.embed_tokens.weight.dtype)
    out, draw = [], torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, prompt in enumerate(prompts):
            for s in cache.chunks(n):
                pos = torch.arange(s.start, s.stop)[None]
                model(torch.tensor([prompt[s]]), pos, cache.prefill(n, s))
        pos = torch.tensor([len(p) for p in prompts]).repeat_interleave(G)
        running = torch.ones(len(pos), dtype=torch.bool)
        for t in range(steps):
            for own in cache.own if t == at else ():
                order = torch.rand(own.pos[..., : own.used].shape, generator=draw).argsort(-1)
                permute(own, order[:, :1].expand_as(order) if e.policy == "tova" else order)
            tokens = (torch.arange(len(pos)) * 7 + t) % V
            out.append(model(tokens[:, None], pos[:, None] + t, cache.decode(pos + t, running)))
    return cache, torch.stack(out)[:, :, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_slot_order_carries_no_meaning(policy):
    """Right after eviction, when there are holes among the live slots."""
    model, prompts = build("qwen3"), make_prompts(LENGTHS)
    for name in ("every 8", "pyramid"):
        plain, shuffled = (drive(model, prompts, schedule(policy, name), 20, at=at)
                           for at in (None, 9))
        assert worst(plain[1], shuffled[1]) <= 1e-12
        assert all(map(torch.equal, plain[0].evict_at, shuffled[0].evict_at))
        for n, P in enumerate(LENGTHS):  # decisions were taken after the shuffle
            assert (plain[0].evict_at[n] > P + 10).logical_and(plain[0].evict_at[n] < NEVER).any()


# ---- gradients and masks of the learner ---------------------------------------------------------


@pytest.mark.parametrize("policy,name", [("snapkv", "chunks"), ("h2o", "pyramid"),
                                         ("tova", "every 1")])
def test_gradients_equal_the_oracle(policy, name, masks, monkeypatch):
    model = build("qwen3", 2)
    roll = sample(model, make_prompts(LENGTHS), schedule(policy, name), stop_ids=STOPS)
    slow = gradients(model, roll, oracle)
    assert apart(gradients(model, roll, learner), slow) <= 1e-10
    calls = len(masks)
    model.checkpointing = True
    assert apart(gradients(model, roll, learner), slow) <= 1e-10
    assert len(masks) == 3 * calls, "checkpointing must have run the forward twice"
    model.checkpointing = False
    monkeypatch.setattr(shadow_mask, "ROWS", 5)
    assert apart(gradients(model, roll, learner), slow) <= 1e-10
    assert apart(gradients(model, roll, learner, dense_record), slow) > CONTROL


@pytest.mark.parametrize("rows,elements", [(512, 2**25), (7, 2**25), (4, 700), (512, 200), (3, 1)])
def test_the_learner_loads_and_masks_no_more_than_a_block_needs(rows, elements, masks, monkeypatch):
    """Whatever the size of a block. One row of one sample is the least."""
    model, e = build("qwen3"), schedule("h2o", "chunks", evict_every=2)
    roll = sample(model, make_prompts(LENGTHS), e)
    monkeypatch.setattr(shadow_mask, "ROWS", rows)
    monkeypatch.setattr(shadow_mask, "MASK_ELEMENTS", elements)
    for n, prompt in enumerate(roll.prompts):
        P, record = len(prompt), roll.evict_at[n]
        masks.clear()
        with torch.no_grad():
            logp = learner(model, prompt, roll.tokens[n], record)
        assert worst(logp, roll.logp[n]) <= 1e-9
        least = 2 * (P + R)
        for m in masks:
            samples, heads, size, columns = m.shape
            assert heads == 2 and size <= rows and m.numel() <= max(elements, least)
            # Of each sample: at most what was live at the block's first row, and its own rows. The
            # rows of a prompt in chunks are one sample's, R response rows at most `rows` at a time.
            assert columns <= samples * (32 + 16) + size
            assert m.any(-1).all(), "a row that sees nothing"
            if samples == 1:  # no key is loaded for nothing, but to fill up a head of fewer
                assert m.any(2).sum(-1).max() == columns
        # As many keys a row as in the inequality.
        i, j = torch.arange(P, P + R)[:, None], torch.arange(P + R)
        want = ((j <= i) & (i < record.unsqueeze(-2))).sum()  # (L, G, Hkv, R, T)
        if (record < P).any():
            i = torch.arange(P)[:, None]
            want += ((j <= i) & (i < record[:, :1].unsqueeze(-2))).sum()
        assert sum(int(m.sum()) for m in masks) == want
        assert (elements < 2**25 or rows < 512) == (len(masks) > 3 * (2 if (record < P).any()
                                                                      else 1))


# ---- the teacher --------------------------------------------------------------------------------


@pytest.mark.parametrize("name,policy", [("chunks", "snapkv"), ("every 8", "h2o"),
                                         ("pyramid", "random"), ("keep", "tova")])
def test_distillation_kl_is_the_oracles(name, policy, monkeypatch):
    """Exact over the vocabulary, dense against recorded. A prompt in one piece lends the teacher
    its rows, which are dense in both passes."""
    model, temperature = build("qwen3"), 0.7
    roll = sample(model, make_prompts(LENGTHS), schedule(policy, name), temperature=temperature,
                  stop_ids=STOPS)
    passes, largest, forward = [], [], type(model).forward

    def count(self, ids, pos, attend):
        passes.append(ids.shape[1])
        return forward(self, ids, pos, attend)

    for n, prompt in enumerate(roll.prompts):
        record, P = roll.evict_at[n], len(prompt)
        chunked = P in {"chunks": (70,), "pyramid": (36, 70)}.get(name, ())
        assert bool((record < P).any()) == chunked
        for s in (slice(0, G), slice(1, G)):
            mask = roll.mask[n, s]
            with torch.no_grad():
                dense, true = (oracle_rows(model, prompt, roll.tokens[n, s], x[:, s],
                                           temperature=temperature)
                               for x in (dense_record(record), record))
            kl = (dense.exp() * (dense - true)).sum(-1)[mask]
            passes.clear()
            with monkeypatch.context() as patch:
                patch.setattr(type(model), "forward", count)
                logp, entropy, found, _ = group_terms(model, roll, n, s, distil=True,
                                                      temperature=temperature)
            assert worst(found, kl) <= 1e-10
            assert worst(logp, roll.logp[n, s][mask]) <= 1e-9
            assert worst(entropy, -(true.exp() * true).sum(-1)[mask]) <= 1e-9
            largest.append(float(kl.max()))
            if largest[-1] == 0:
                assert (record[:, s] == NEVER).all()
                continue
            packed = P + len(mask) * int(roll.lengths[n, s].max())
            assert passes == [packed, packed if chunked else packed - P]
    assert max(largest) > CONTROL, largest


# ---- storage ------------------------------------------------------------------------------------


def storages(cache: KVCache) -> list[torch.Tensor]:
    return [x for layers in (*cache.prompts, cache.own) for slots in layers if slots is not None
            for x in (slots.k, slots.v)]


@pytest.mark.parametrize("policy", ["recent", "h2o"])
def test_a_long_prompt_in_chunks_never_holds_more_than_budget_and_chunk(policy):
    """4,096 tokens, budget 256, chunks of 128; the embedded model in float32."""
    model, P, B, K = load_model(EMBEDDED, dtype=torch.float32), 4096, 256, 128
    cfg, ids = model.cfg, torch.arange(P)[None] % 500
    key_bytes = 2 * cfg.L * cfg.Hkv * cfg.D * 4
    assert key_bytes == 2 * 4 * 2 * 64 * 4

    def cache(**options):
        e = Eviction(policy, 1.0, budget=B, window=8, **options)
        return KVCache(cfg, [P], G, 16, eviction=e, sequence=[0], dtype=torch.float32)

    chunked = cache(prefill_chunk=K)
    pieces = chunked.chunks(0)
    assert [(s.start, s.stop) for s in pieces] == [(i, i + K) for i in range(0, P, K)]
    with torch.no_grad():
        for s in pieces:
            model(ids[:, s], torch.arange(P)[None, s], chunked.prefill(0, s))
            held = key_bytes * (B + K if s.stop < P else B)
            assert chunked.kv_bytes == held
            assert sum(x.untyped_storage().nbytes() for x in storages(chunked)) == held
            for slots in chunked.prompts[0]:
                assert ((slots.pos >= 0).sum(-1) == min(s.stop, B)).all()

    # The control: in one piece a single layer holds the whole prompt.
    class Enough(Exception):
        pass

    plain = cache()
    attend = plain.prefill(0, slice(0, P))
    width = []

    def first(layer, q, k, v):
        if layer:
            raise Enough
        write = Slots.write
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Slots, "write", lambda self, *x: (width.append(self.k.nbytes * 2),
                                                            write(self, *x)))
            return attend(layer, q, k, v)

    assert plain.chunks(0) == [slice(0, P)]
    with pytest.raises(Enough), torch.no_grad():
        model(ids, torch.arange(P)[None], first)
    assert width == [2 * cfg.Hkv * cfg.D * 4 * P]
    assert plain.kv_bytes == 2 * cfg.Hkv * cfg.D * 4 * B, "and lets it go"


@pytest.mark.parametrize("policy,name", [("snapkv", "every 8"), ("h2o", "pyramid"),
                                         ("recent", "every 1")])
def test_storage_is_flat_while_decoding(policy, name):
    model, prompts, steps = build("qwen3", dtype=torch.float32), make_prompts(LENGTHS), 300
    e, pointers, starts = schedule(policy, name), set(), []
    size = sum(B + e.evict_every for B in BUDGETS[name]) * 2 * 2 * 8 * 4  # of a row

    class Noting(KVCache):
        def _slots(self, rows, *args, **options):
            made = super()._slots(rows, *args, **options)
            if rows == len(LENGTHS) * G:  # own slots of one more layer: of those before, the
                layer = len(self.own)  # prompts' keys are copied and gone
                kept = sum(left[i] for left in LEFT[name] for i in range(layer, 3))
                own = sum(B + e.evict_every for B in BUDGETS[name][:layer]) * rows
                held = sum(x.nbytes for x in storages(self))
                assert held == 2 * 2 * 8 * 4 * (kept + own)
                starts.append(layer)
            return made

        def decode(self, pos, running):
            attend = super().decode(pos, running)
            pointers.add(tuple(x.data_ptr() for x in storages(self))
                         + tuple(own.pos.data_ptr() for own in self.own))
            assert self.kv_bytes == len(LENGTHS) * G * size and self.prompts == []
            return attend

    cache, hidden = drive(model, prompts, e, steps, kind=Noting)
    assert starts == [0, 1, 2]
    assert len(pointers) == 1 and cache.steps == steps and torch.isfinite(hidden).all()
    assert sum(x.untyped_storage().nbytes() for x in storages(cache)) == cache.kv_bytes
    for layer, own in enumerate(cache.own):
        live, B = (own.pos >= 0).sum(-1), BUDGETS[name][layer]
        assert (live >= B).all() and (live < B + e.evict_every).all()


@pytest.mark.parametrize("samples,tokens", [(G, R), (G, 3), (1, 2), (1, 1)])
def test_rollout_states_its_peak(samples, tokens):
    """The larger of prefill and decoding; a row that cannot reach B + N gets no slot beyond what it
    may write. One token needs no decoding."""
    model, prompts = build("qwen3"), make_prompts(LENGTHS)
    key = 2 * 2 * 8 * 8  # bytes of a key and value in the 2 heads of a layer
    larger = []
    for name in SCHEDULES:
        e = schedule("recent", name)
        roll = sample(model, prompts, e, G=samples, max_new=tokens)
        prefill, done = 0, 0  # while a prompt passes in chunks, those before it are held, too
        for n, P in enumerate(LENGTHS):
            left = LEFT[name][n]
            if e.prefill_chunk and P > min(left):
                prefill = max(prefill, done + sum(min(P, B + 16) for B in left))
            done += sum(left)
        prefill, rows = max(prefill, done), len(LENGTHS) * samples
        if e.budget is None:
            decoding = done + rows * 3 * tokens
        else:
            limits = [B + e.evict_every for B in BUDGETS[name]]
            decoding = rows * sum(max(min(limit, left[layer] + tokens) for left in LEFT[name])
                                  for layer, limit in enumerate(limits))
        if tokens == 1:
            decoding = 0
        assert roll.kv_bytes_peak == key * max(prefill, decoding)
        assert roll.kv_bytes_dense == key * 3 * (sum(LENGTHS) + rows * tokens)
        larger.append(prefill > decoding)
    assert any(larger) == (samples == 1)


# ---- what the policies look at ------------------------------------------------------------------


@pytest.mark.parametrize("policy,queries", [("snapkv", 12), ("rkv", 8), ("tova", 1), ("h2o", 0)])
def test_policies_see_the_last_queries_and_the_live_keys(policy, queries):
    """Chunks of 5 are fewer tokens than vote; the first cuts while decoding come so early that the
    prompt's queries vote, too."""
    model, prompts, seen_at = build("qwen3"), make_prompts(LENGTHS), set()
    plain = POLICIES[policy]

    class Noting(KVCache):
        """All queries and keys, by position."""

        def __init__(self, cfg, *args, **options):
            super().__init__(cfg, *args, **options)
            T, rows = max(LENGTHS) + self.R, len(LENGTHS) * G
            self.every_q = torch.full((3, rows, cfg.Hq, T, cfg.D), torch.nan, dtype=torch.float64)
            self.every_k = torch.full((3, rows, cfg.Hkv, T, cfg.D), torch.nan, dtype=torch.float64)
            self.policy = plain._replace(score=self.score)

        def prefill(self, n, chunk):
            attend = super().prefill(n, chunk)

            def noting(layer, q, k, v):
                self.every_q[layer, n * G : (n + 1) * G, :, chunk] = q
                self.every_k[layer, n * G : (n + 1) * G, :, chunk] = k
                return attend(layer, q, k, v)
            return noting

        def decode(self, pos, running):
            attend = super().decode(pos, running)

            def noting(layer, q, k, v):
                for b, i in enumerate(pos.tolist()):
                    self.every_q[layer, b, :, i] = q[b, :, 0]
                    self.every_k[layer, b, :, i] = k[b, :, 0]
                return attend(layer, q, k, v)
            return noting

        def score(self, seen):
            n, rows = seen.sequence, len(seen.pos)
            decoding = seen.t >= LENGTHS[n]
            assert rows == (G if decoding else 1) and seen.seed == 1
            assert seen.q.shape[2] == min(queries, 8 if decoding else 12)
            at, last = slice(n * G, n * G + rows), slice(seen.t + 1 - seen.q.shape[2], seen.t + 1)
            assert torch.equal(seen.q, self.every_q[seen.layer, at, :, last])
            live = seen.pos >= 0
            index = seen.pos.clamp(min=0).unsqueeze(-1).expand_as(seen.k)
            assert torch.equal(seen.k[live], self.every_k[seen.layer, at].gather(2, index)[live])
            assert (seen.pos.amax(-1) == seen.t).all()
            seen_at.add((n, seen.layer, decoding, seen.t - LENGTHS[n] < 7))
            return plain.score(seen)

    for name, options in (("every 8", {}), ("chunks", {"prefill_chunk": 5, "evict_every": 4})):
        seen_at.clear()
        e = schedule(policy, name, window=12, **options)
        cache, _ = drive(model, prompts, e, 14, kind=Noting)
        newest = (16, 16) if policy == "h2o" else (12, 8)  # kept by prefill and while decoding
        least = []
        for P, record in zip(LENGTHS, cache.evict_at, strict=True):
            age = record - torch.arange(record.shape[-1])  # at eviction; the newest key has 1
            assert (age[record <= P] > newest[0]).all() and (age[record > P] > newest[1]).all()
            least.append(age[record > P].min())
        assert min(least) <= newest[1] + 4, "more than the newest were kept"
        for n, layer in ((n, layer) for n in (1, 2) for layer in range(3)):
            if name == "chunks" or n == 2:
                assert (n, layer, False, True) in seen_at
            assert (n, layer, True, name == "chunks" or n == 1) in seen_at


@pytest.mark.parametrize("groups", [1, 7])
@pytest.mark.parametrize("name", ["every 1", "every 8", "chunks", "pyramid"])
def test_mass_is_the_attention_received(name, groups, watch):
    """Of each live key, in the replayed attention: mean over the query heads, sum over queries."""
    model = build("qwen3", groups)
    roll = sample(model, make_prompts(LENGTHS), schedule("h2o", name))
    cache = watch[0]
    for n, prompt in enumerate(roll.prompts):
        attention = []
        with torch.no_grad():
            oracle_rows(model, prompt, roll.tokens[n], roll.evict_at[n], attention=attention)
        for layer, p in enumerate(attention):  # (G, Hkv, T, T); the last token was no query
            received = p[:, :, :-1].sum(2)
            own = cache.own[layer]
            pos, mass = (x[n * G : (n + 1) * G] for x in (own.pos, own.mass))
            live = pos >= 0
            expected = received.gather(-1, pos.clamp(min=0))
            assert live.any(-1).all() and worst(mass, expected, live) <= 1e-12
            # Reset when a slot is reused: what evicted keys had received is gone.
            lost = bool((roll.evict_at[n][layer] != NEVER).any())
            assert (received.sum() - mass[live].sum() > CONTROL) == lost


def test_mass_after_a_prompt_in_chunks():
    model, (prompt,) = build("qwen3"), make_prompts((70,))
    e = schedule("h2o", "chunks")
    cache = KVCache(model.cfg, [70], G, R, eviction=e, sequence=[0], dtype=torch.float64)
    with torch.no_grad():
        for s in cache.chunks(0):
            model(torch.tensor([prompt[s]]), torch.arange(70)[None, s], cache.prefill(0, s))
        attention, record = [], cache.evict_at[0][:, :1]
        oracle_rows(model, torch.tensor(prompt), torch.zeros(1, R, dtype=torch.int64), record,
                    attention=attention)
    for slots, p in zip(cache.prompts[0], attention, strict=True):
        received = p[:, :, :70].sum(2).gather(-1, slots.pos)
        assert (slots.pos >= 0).all() and worst(slots.mass, received) <= 1e-12


def test_tova_is_one_set_a_layer_and_snapkv_one_a_head():
    model = build("qwen3")
    for name in ("keep", "every 8", "chunks"):
        for record in sample(model, make_prompts(LENGTHS), schedule("tova", name)).evict_at:
            assert torch.equal(record, record[:, :, :1].expand_as(record))
            assert all((record[a] != record[b]).any() for a, b in ((0, 1), (0, 2), (1, 2)))
        records = sample(model, make_prompts(LENGTHS), schedule("snapkv", name)).evict_at
        apart = [(record[:, :, 0] != record[:, :, 1]).flatten(1).any(1) for record in records]
        assert torch.stack(apart).any(0).all(), "each layer, for some prompt"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0, "mixed"])
def test_a_policy_of_useless_scores_keeps_the_contract(value, monkeypatch):
    """Ties go to the newer key, so this is `recent`; sinks and newest stay in any case."""
    def useless(seen):
        score = torch.full(seen.pos.shape, 0.0 if value == "mixed" else value)
        if value == "mixed":
            odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
            score = odd[seen.pos % 4]
        return score

    model, prompts = build("qwen3"), make_prompts(LENGTHS)
    expected = sample(model, prompts, schedule("recent", "pyramid"))
    monkeypatch.setitem(kvcache.POLICIES, "recent", Policy(useless))
    roll = sample(model, prompts, schedule("recent", "pyramid"))
    compare(model, roll)
    for n, record in enumerate(roll.evict_at):
        assert (record[..., :4] == NEVER).all(), "sinks"
        for j in range(LENGTHS[n] + R):
            assert (record[..., j] > j + 8).all(), "the newest 8"
        if value != "mixed":
            assert torch.equal(record, expected.evict_at[n])
