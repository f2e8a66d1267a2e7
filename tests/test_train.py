"""train.py, config.py, eval.py, benchmarks/mismatch.py and data/stories.py: what a run promises.

A random two-layer model and a few problems written here, so that a step takes milliseconds; the
trained weights play no part. `varied` replaces the reward by a function of the text that is 1 half
of the time: a random model would earn 0 throughout, and every group would be dead.
"""

import dataclasses
import importlib
import json
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import eval as evaluation
import train
from config import Config, parse
from data import gsm8k, stories
from errors import BadInput, run_cli
from eviction import DENSE
from model import DTYPES, ModelConfig, Qwen, causal, load_model, save_model
from runs import pretrain
from tokenizer import Tokenizer

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]
TRAIN_ROWS = TEST_ROWS = 6  # whole steps of 2 prompts make an epoch
ALWAYS = """reward/mean reward/dead_group_frac len/mean_tok len/truncated_frac
    mismatch/logp_abs_mean mismatch/logp_abs_max mismatch/kl mismatch/ratio_p01 distill/kl
    policy/entropy policy/clip_frac grad/norm kv/bytes_peak kv/bytes_dense mem/rollout_bytes_peak
    mem/learner_bytes_peak time/rollout_sec time/learn_sec tok/rollout_per_sec
    tok/learn_per_sec""".split()
SAMPLE = """step problem sample prompt completion reward advantage prompt_tok response_tok
    stopped""".split()


# ---- a tiny model, a few problems, and how to run on them ---------------------------------------


@pytest.fixture(scope="session")
def tok():
    return Tokenizer.load(stories.MODEL)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tok):
    """A folder with a random Qwen3 whose attention is peaked: what is evicted matters."""
    folder = tmp_path_factory.mktemp("tiny")
    hf = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
          "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
          "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
          "rope_theta": 1000.0, "max_position_embeddings": 1024, "tie_word_embeddings": True,
          "attention_bias": False, "vocab_size": -(-tok.vocab_size // 16) * 16,
          "eos_token_id": tok.control["<|im_end|>"]}
    model, draw = Qwen(ModelConfig.from_hf(hf)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=draw)
            if p.ndim == 2:
                p.copy_(noise * (0.3 if "embed" in name else p.shape[1] ** -0.5))
            else:
                p.copy_((1.5 if "q_norm" in name or "k_norm" in name else 1.0) + 0.2 * noise)
    save_model(model, folder)
    tok.save(folder)
    return folder


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """A folder in GSM8K's format. One question holds a U+2028, as one of the real ones does."""
    folder = tmp_path_factory.mktemp("rows")
    for split, n in (("train", TRAIN_ROWS), ("test", TEST_ROWS)):
        lines = []
        for i in range(n):
            question = f"Tom has {i + 3} pens\u2028and {split} {'buys caps ' * (2 + i)}. How many?"
            answer = f"{i + 3} + 4 = <<{i + 3}+4={i + 7}>>{i + 7}\n#### {i + 7}"
            lines.append(json.dumps({"question": question, "answer": answer}, ensure_ascii=False))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def flags(tiny, rows, tmp_path, monkeypatch):
    """flags("run", lr=1e-3, ...) -> a command line; None drops a flag, True is a bare one."""
    monkeypatch.chdir(tmp_path)

    def make(out="run", **more):
        given = {"task": "gsm8k", "model": tiny, "data_dir": rows, "out": out, "steps": 4,
                 "prompts": 2, "group": 3, "max_new": 6, "window": 4, "sinks": 2, "lr": 1e-3,
                 "limit": 0, "eval_every": 0, "eval_during": 2, "save_every": 0,
                 "dtype": "fp32", "device": "cpu", **more}
        argv = []
        for name, value in given.items():
            name = "--" + name.replace("_", "-")
            argv += [] if value is None else [name] if value is True else [name, str(value)]
        return argv

    return make


@pytest.fixture
def go(flags, tmp_path):
    """go("run", ...) trains and returns the folder of the run."""

    def start(out="run", **more):
        train.run(parse(flags(out, **more), train.__doc__))
        return tmp_path / out

    return start


def crc(text, problem=None):
    return float(zlib.crc32(text.encode()) & 1)


@pytest.fixture
def varied(monkeypatch):
    monkeypatch.setattr(gsm8k, "reward", crc)
    monkeypatch.setitem(gsm8k.METRICS, "accuracy", crc)


def lines(path):
    return [json.loads(x) for x in path.read_text(encoding="utf-8").removesuffix("\n").split("\n")]


def metrics(out):
    """Log lines without what is measured by a clock."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "mem/", "tok/"))}
            for row in lines(out / "metrics.jsonl")]


def last(out):
    (folder,) = out.glob("checkpoint-*")
    return folder


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def same(a, b):
    """Nested containers of tensors and numbers, equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def saved(out):
    """All but the seconds, which no two runs have in common."""
    return {k: x for k, x in torch.load(last(out) / "trainer.pt").items() if k != "seconds"}


def summary(out):
    return json.loads((out / "summary.json").read_text())


def assert_same_run(a, b):
    assert metrics(a) == metrics(b)
    assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    assert weights(last(a)) == weights(last(b))
    assert same(saved(a), saved(b))
    assert {**summary(a), "seconds": 0} == {**summary(b), "seconds": 0}


# ---- resume -------------------------------------------------------------------------------------

EVERYTHING = {"save_every": 3, "eval_every": 2, "limit": 3, "control": True}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stop", ["finished", "crashed", "disk full"])
def test_a_resumed_run_equals_the_uninterrupted_one(go, varied, monkeypatch, dtype, stop):
    options = {**EVERYTHING, "dtype": dtype}
    whole = go("whole", steps=8, **options)
    assert [x["step"] for x in metrics(whole)] == list(range(1, 9))
    assert len(lines(whole / "samples.jsonl")) == 8 * 2 * 3
    if stop == "finished":
        part = go("part", steps=4, **options)
    else:
        with monkeypatch.context() as m, pytest.raises((OSError, BadInput), match="No space left"):
            append, save = train.append, torch.save

            def full(path, rows):  # no room for the second sample of step 5
                if path.name == "samples.jsonl" and rows[0]["step"] == 5:
                    append(path, rows[:1])
                    path.open("a").write('{"step": 5, "prob')
                    raise OSError(28, "No space left on device")
                append(path, rows)

            def half(value, path):  # no room for the checkpoint of step 6
                save(value, path)
                if value["step"] == 6:
                    path.write_bytes(path.read_bytes()[:1000])
                    raise OSError(28, "No space left on device")

            m.setattr(*((train, "append", full) if stop == "crashed" else (torch, "save", half)))
            go("part", steps=8, **options)
        part = whole.parent / "part"
        assert last(part).name == "checkpoint-000003"
        assert load_model(last(part), dtype=DTYPES[dtype]).cfg.L == 2
        assert metrics(part)[-1]["step"] == (5 if stop == "crashed" else 6)
        assert (part / "checkpoint.tmp").exists() == (stop == "disk full")
    go("part", steps=8, resume=True, **options)
    assert_same_run(whole, part)
    assert not (part / "checkpoint.tmp").exists()


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts(go):
    part = go("part", steps=2)
    state = torch.load(last(part) / "trainer.pt")
    assert 0 < state["seconds"] <= summary(part)["seconds"]
    torch.save({**state, "seconds": 1000.0}, last(part) / "trainer.pt")
    go("part", steps=4, resume=True)
    assert 1000 < torch.load(last(part) / "trainer.pt")["seconds"] < summary(part)["seconds"] < 1100


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_control_a_resume_that_loses_the_optimiser_differs(go, varied, monkeypatch, dtype):
    whole = go("whole", steps=6, dtype=dtype)
    part = go("part", steps=3, dtype=dtype)
    monkeypatch.setattr(train.MasterOptimizer, "load_state_dict", lambda self, state: None)
    go("part", steps=6, dtype=dtype, resume=True)
    assert weights(last(whole)) != weights(last(part))
    other = go("other", steps=6, dtype=dtype, seed=1)
    assert metrics(whole) != metrics(other) and weights(last(whole)) != weights(last(other))


KILLED = """
import os, signal, sys, zlib
import torch, train
from config import parse
from data import gsm8k
gsm8k.reward = lambda text, problem: float(zlib.crc32(text.encode()) & 1)
gsm8k.METRICS["accuracy"] = gsm8k.reward
save = torch.save
def dying(value, path):
    save(value, path)
    if value["step"] == 6:
        path.write_bytes(path.read_bytes()[:1000])
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = dying
train.run(parse(sys.argv[1:], train.__doc__))
"""


def program(*argv, **more):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *map(str, argv)], env=env, capture_output=True,
                          text=True, **more)


def test_a_run_killed_while_saving_goes_on_from_the_checkpoint_before(go, flags, varied, tmp_path):
    options = {**EVERYTHING, "dtype": "bf16", "steps": 8}
    done = program("-c", KILLED, *flags("part", **options))
    assert done.returncode == -9, done.stderr
    part = tmp_path / "part"
    assert last(part).name == "checkpoint-000003" and (part / "checkpoint.tmp/trainer.pt").exists()
    assert [x["step"] for x in metrics(part)] == [1, 2, 3, 4, 5, 6]
    go("part", resume=True, **options)
    assert_same_run(go("whole", **options), part)


def test_resuming_a_finished_run_changes_nothing(go, varied):
    out = go(**EVERYTHING)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    go(resume=True, **EVERYTHING)
    after = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    changed = [p.name for p in after if before.get(p) != after[p]]
    assert before.keys() == after.keys()
    assert sorted(changed) == ["config.json", "summary.json"]  # its --resume, its seconds


def test_overwrite_starts_anew(go, varied):
    out = go(steps=2, seed=1)
    (out / "old").write_text("x")
    go(steps=2, overwrite=True)
    assert not (out / "old").exists()
    assert_same_run(out, go("other", steps=2))


# ---- evaluation, updates, learning rate ---------------------------------------------------------


def test_evaluation_and_control_change_nothing(go, varied):
    plain = go("plain")
    for name, more in {"during": {"eval_every": 1}, "around": {"limit": 3},
                       "control": {"control": True}, "saving": {"save_every": 1}}.items():
        out = go(name, **more)
        assert weights(last(out)) == weights(last(plain)), name
        extra = {"eval/dense", "eval/evicted", "reward/control_mean"}
        assert [{k: v for k, v in x.items() if k not in extra} for x in metrics(out)] == metrics(
            plain), name
        assert any(extra & x.keys() for x in metrics(out)) == (name in ("during", "control"))
    assert weights(last(go("seed", seed=1))) != weights(last(plain))


def test_the_control_is_the_untrained_model_on_the_same_prompts_and_numbers(go, varied):
    out = go(steps=8, control=True, lr=0.05)
    rows = metrics(out)
    assert rows[0]["reward/control_mean"] == rows[0]["reward/mean"]  # nothing was learnt before it
    still = metrics(go("still", steps=8, lr=0))
    assert [x["reward/control_mean"] for x in rows] == [x["reward/mean"] for x in still]
    assert [x["reward/mean"] for x in rows] != [x["reward/mean"] for x in still]


def test_the_same_prompt_is_sampled_anew_in_each_epoch_and_by_each_sample(go):
    texts = {}
    for x in lines(go(steps=6, lr=0) / "samples.jsonl"):
        texts.setdefault(x["problem"], set()).add(x["completion"])
    assert len(texts) == TRAIN_ROWS
    assert all(len(x) == 2 * 3 for x in texts.values())  # two epochs, three samples, no repetition


@pytest.mark.parametrize("lr", [1e-3, 1e-6])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_move_by_the_logged_learning_rate(go, tiny, varied, dtype, lr):
    """AdamW's first step is lr * g / (|g| + eps): the largest change is the learning rate."""
    out = go(steps=1, lr=lr, dtype=dtype)
    assert metrics(out)[0]["lr"] == lr
    before = load_model(tiny, dtype=DTYPES[dtype])
    after = saved(out)["optim"]["masters"]
    after = after or load_model(last(out), dtype=torch.float32).parameters()
    moved = torch.cat([(b.detach().float() - a.detach().float()).flatten()
                       for a, b in zip(before.parameters(), after, strict=True)])
    assert float(moved.abs().max()) == pytest.approx(lr, rel=0.15 if lr == 1e-6 else 1e-3)
    assert float((moved != 0).float().mean()) > 0.5
    rounded = load_model(last(out), dtype=DTYPES[dtype])
    after = saved(out)["optim"]["masters"] or rounded.parameters()
    assert all(torch.equal(p, m.to(p.dtype))
               for p, m in zip(rounded.parameters(), after, strict=True))
    if dtype == "fp32":
        assert weights(last(out)) != weights(tiny)
        assert weights(last(go("two", steps=2, lr=lr))) != weights(last(out))


def test_no_steps(go, varied):
    out = go(steps=0, limit=4)
    assert not (out / "metrics.jsonl").exists() and not list(out.glob("checkpoint*"))
    x = summary(out)
    assert x["steps"] == 0 and x["n_eval"] == 4 and x["skipped_steps"] == 0
    for cache in ("dense", "evicted"):
        assert x[f"accuracy_before_{cache}"] == x[f"accuracy_after_{cache}"]


def test_the_checkpoint_loads_here_and_in_transformers(go, tok, varied):
    transformers = pytest.importorskip("transformers")
    folder = last(go(steps=2))
    text = "Tom has 12 pens.\nHow many?\u00e9 \u4e2d"
    ids = torch.tensor([tok.chat(text)])
    here = load_model(folder, dtype=torch.float32)
    there = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        ours = here.logits(here(ids, torch.arange(ids.shape[1])[None], causal))
        theirs = there(ids).logits
    assert float((ours - theirs).abs().max()) < 1e-4 < float(ours.abs().max())
    other = transformers.AutoTokenizer.from_pretrained(folder)
    assert other(text)["input_ids"] == tok.encode(text) == Tokenizer.load(folder).encode(text)
    chat = [{"role": "user", "content": text}]
    told = other.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    assert told["input_ids"] == tok.chat(text) == Tokenizer.load(folder).chat(text)
    assert Tokenizer.load(folder).stop_ids == tok.stop_ids


# ---- steps with a NaN ---------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch, varied):
    """broken({3: "loss"}) poisons steps; the list has weights and moments before and after each."""
    seen = []

    def install(bad):
        backward, step_of = train.backward, train.train_step

        def poisoned(model, *args):
            told = backward(model, *args)
            if bad.get(now[0]) == "loss":
                told["loss"] = math.nan
            elif now[0] in bad:
                value = float(bad[now[0]])
                next(p for p in model.parameters() if p.grad is not None).grad.fill_(value)
            return told

        def snapshot(model, optim):
            return [[p.detach().clone() for p in model.parameters()],
                    [x.clone() for s in optim.optimizer.state.values() for x in s.values()]]

        def step(model, optim, tok, batch, cfg, step, teacher):
            now[0] = step + 1
            before = snapshot(model, optim)
            out = step_of(model, optim, tok, batch, cfg, step, teacher)
            seen.append((before, snapshot(model, optim)))
            return out

        now = [0]
        monkeypatch.setattr(train, "backward", poisoned)
        monkeypatch.setattr(train, "train_step", step)
        return seen

    return install


def test_a_step_with_a_nan_is_skipped(go, broken):
    bad = {2: "loss", 4: "nan", 5: "inf"}
    seen = broken(bad)
    out = go(steps=6)
    assert [same(*x) for x in seen] == [False, True, False, True, True, False]
    assert [x["step/skipped"] for x in metrics(out)] == [0, 1, 0, 1, 1, 0]
    assert summary(out)["skipped_steps"] == 3


def cli(argv):
    run_cli(lambda: train.run(parse(argv, train.__doc__)))


def test_ten_such_steps_in_a_row_end_the_run(go, flags, broken, capsys, tmp_path):
    seen = broken({s: "loss" for s in range(3, 20)})
    with pytest.raises(SystemExit) as e:
        cli(flags(steps=30, save_every=2))
    assert e.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: 10 steps in a row, up to 12,") and "--lr" in message
    out = tmp_path / "run"
    assert len(metrics(out)) == 12 and not (out / "summary.json").exists()
    good = load_model(last(out), dtype=torch.float32)
    assert same(list(good.parameters()), seen[1][1][0])


def test_such_steps_are_counted_across_a_resume(go, broken):
    broken({s: "loss" for s in range(3, 30)})
    out = go(steps=6, save_every=2)
    assert last(out).name == "checkpoint-000002"  # none is saved once the weights are in doubt
    with pytest.raises(BadInput, match="up to 12"):
        go(steps=30, save_every=2, resume=True)
    assert last(out).name == "checkpoint-000002"
    assert len(metrics(out)) == 12


def test_nine_and_then_a_good_one_go_on(go, broken):
    broken({s: "loss" for s in range(1, 20) if s != 10})
    out = go(steps=20)
    assert summary(out)["skipped_steps"] == 18 and len(metrics(out)) == 20


# ---- whose dense pass is distilled -------------------------------------------------------------


def test_the_initial_teacher_stays_what_it_was(go, tiny, varied, monkeypatch):
    """Also after a resume; the policy of the first step is its own teacher."""
    once, taught = train.backward, []

    def spy(model, *args):
        taught.append(args[-1])
        return once(model, *args)

    monkeypatch.setattr(train, "backward", spy)
    ends = {name: go(name, lam=0.5, keep=0.3, teacher=name) for name in ("self", "initial")}
    assert taught[:4] == [None] * 4 and len({id(x) for x in taught[4:]}) == 1
    start = load_model(tiny, dtype=torch.float32)
    assert same(list(taught[-1].parameters()), list(start.parameters()))
    a, b = (metrics(x) for x in ends.values())
    assert a[0]["distill/kl"] == pytest.approx(b[0]["distill/kl"], rel=1e-4) and a[0]["distill/kl"]
    assert a[-1]["distill/kl"] != pytest.approx(b[-1]["distill/kl"], rel=1e-3)
    taught.clear()
    go("cut", lam=0.5, keep=0.3, teacher="initial", steps=2)
    assert_same_run(go("cut", lam=0.5, keep=0.3, teacher="initial", resume=True), ends["initial"])
    assert same(list(taught[-1].parameters()), list(start.parameters()))
    taught.clear()
    go("nothing", lam=0, steps=1, control=True)
    assert taught == [None]


# ---- rewards that say nothing -------------------------------------------------------------------


def by_prompt(text, problem):
    return float(problem.index % 2)


def test_a_reward_that_ignores_the_response_leaves_the_policy_unchanged(go, tiny, monkeypatch):
    start = load_model(tiny, dtype=torch.float32)
    monkeypatch.setattr(gsm8k, "reward", by_prompt)
    for method in ("smd", "naive", "sparse-rl", "dense"):
        end = load_model(last(go(method, method=method, lam=0 if method == "smd" else None)),
                         dtype=torch.float32)
        assert same(list(start.parameters()), list(end.parameters()))
    monkeypatch.setattr(gsm8k, "reward", crc)
    end = load_model(last(go("control", lam=0)), dtype=torch.float32)
    assert not same(list(start.parameters()), list(end.parameters()))


@pytest.mark.parametrize("differs_at, warnings", [(None, 1), (2, 1), (3, 0)])
def test_rewards_without_a_difference_give_one_warning(go, monkeypatch, capsys, differs_at,
                                                       warnings):
    step_of = train.train_step

    def step(model, optim, tok, batch, cfg, step, teacher):
        monkeypatch.setattr(gsm8k, "reward", crc if step + 1 == differs_at else by_prompt)
        return step_of(model, optim, tok, batch, cfg, step, teacher)

    monkeypatch.setattr(train, "train_step", step)
    monkeypatch.setattr(train, "DEAD_STEPS", 4)
    out = go(steps=6)
    if differs_at:
        assert metrics(out)[differs_at - 1]["reward/dead_group_frac"] < 1
    told = capsys.readouterr()
    assert (told.out + told.err).count("warning: for 4 steps") == warnings


def test_a_metric_that_fails_counts_nothing(go, monkeypatch):
    monkeypatch.setitem(gsm8k.METRICS, "accuracy",
                        lambda text, p: 1.0 if p.index == 1 else math.nan if p.index else 1 / 0)
    with pytest.warns(UserWarning, match="a score raised ZeroDivisionError"):
        out = go(steps=1, limit=4, eval_every=0)
    assert summary(out)["scores_after_dense"] == [0.0, 1.0, 0.0, 0.0]
    assert summary(out)["accuracy_after_dense"] == 0.25


def test_rewards_that_fail_abstain_and_the_logs_stay_json(go, monkeypatch):
    def strict(path):
        def refuse(word):
            raise AssertionError(word)
        return [json.loads(x, parse_constant=refuse) for x in lines_of(path)]

    def lines_of(path):
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")

    def fails(text, problem):
        if problem.index % 2:
            raise RuntimeError("a reward of the user's")
        return math.nan

    monkeypatch.setattr(gsm8k, "reward", fails)
    monkeypatch.setattr("eval.warnings", SimpleNamespace(warn=lambda *a, **k: None))
    out = go(steps=2, control=True, save_every=1)
    rows = strict(out / "metrics.jsonl")
    assert [x["reward/abstained_frac"] for x in rows] == [1.0, 1.0]
    assert {x["reward/mean"] for x in rows} == {x["reward/control_mean"] for x in rows} == {None}
    assert {x["reward"] for x in strict(out / "samples.jsonl")} == {None}
    assert len(metrics(go(steps=3, control=True, save_every=1, resume=True))) == 3


# ---- what a run writes --------------------------------------------------------------------------


def test_files_and_keys(go, varied, tiny, rows):
    out = go(limit=3, eval_every=2, control=True)
    written = {"config.json", "metrics.jsonl", "samples.jsonl", "summary.json", "checkpoint-000004"}
    assert {p.name for p in out.iterdir()} == written
    for n, row in enumerate(lines(out / "metrics.jsonl"), 1):
        assert not set(ALWAYS) - row.keys() and row["step"] == n
        assert all(math.isfinite(x) for x in row.values())
        assert ("eval/dense" in row and "eval/evicted" in row) == (n % 2 == 0)
        assert row["mismatch/logp_abs_max"] < 1e-4
        for name in ALWAYS[-6:]:
            assert row[name] > 0
    x = summary(out)
    for when in ("before", "after"):
        for cache in ("dense", "evicted"):
            low, high = x[f"interval_{when}_{cache}"]
            assert 0 <= low <= x[f"accuracy_{when}_{cache}"] <= high <= 1
    assert x["n_eval"] == 3 and x["steps"] == 4 and x["seconds"] > 0 and x["skipped_steps"] == 0
    assert x["mismatch_logp_abs_max"] == max(r["mismatch/logp_abs_max"] for r in metrics(out))
    config = json.loads((out / "config.json").read_text())
    assert not {f.name for f in dataclasses.fields(Config)} - config.keys()
    unlimited = ["budget", "evict_every", "prefill_chunk", "recent", "lora_rank", "lora_alpha"]
    assert [k for k, v in config.items() if v is None] == unlimited
    expected = {"device": "cpu", "seed": 0, "torch": torch.__version__, "model": str(tiny),
                "lam": 0.1, "checkpointing": True, "loss": "dapo", "lr": 1e-3, "keep": 0.5}
    assert {k: config[k] for k in expected} == expected
    assert bool(config["commit"]) == ((ROOT / ".git").exists() and bool(shutil.which("git")))


def test_samples(go, varied, tok, rows):
    out = go(steps=6)
    problems = {p.index: p for p in gsm8k.load("train", str(rows))}
    by_group = {}
    for row in lines(out / "samples.jsonl"):
        assert list(row) == SAMPLE
        assert row["prompt"] == problems[row["problem"]].prompt
        assert row["prompt_tok"] == len(tok.chat(row["prompt"]))
        assert row["reward"] == crc(row["completion"])
        assert 1 <= row["response_tok"] <= 6 and (row["stopped"] or row["response_tok"] == 6)
        by_group.setdefault((row["step"], row["problem"]), []).append(row)
    assert len(by_group) == 6 * 2
    alive = 0
    for group in by_group.values():
        assert [x["sample"] for x in group] == [0, 1, 2]
        got, reward = ([x[k] for x in group] for k in ("advantage", "reward"))
        mean = sum(reward) / 3
        deviation = math.sqrt(sum((x - mean) ** 2 for x in reward) / 2)
        assert got == pytest.approx([(x - mean) / (deviation + 1e-6) for x in reward], abs=1e-5)
        alive += deviation > 0
    assert alive > 3
    for row in metrics(out):
        mine = [x for x in lines(out / "samples.jsonl") if x["step"] == row["step"]]
        assert row["reward/mean"] == pytest.approx(sum(x["reward"] for x in mine) / 6)
        assert row["len/mean_tok"] == pytest.approx(sum(x["response_tok"] for x in mine) / 6)
        assert row["len/truncated_frac"] == pytest.approx(sum(not x["stopped"] for x in mine) / 6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kv_bytes(go, dtype):
    out = go(dtype=dtype, keep=0.4, max_new=7)
    for row in metrics(out):
        prompts = {x["problem"]: x["prompt_tok"] for x in lines(out / "samples.jsonl")
                   if x["step"] == row["step"]}
        kept = [min(P, max(math.floor(0.4 * P + 0.5), 2 + 4)) for P in prompts.values()]
        each = 2 * 2 * 2 * 16 * (4 if dtype == "fp32" else 2)  # 2 L Hkv D bytes
        assert row["kv/bytes_peak"] == each * (sum(kept) + 2 * 3 * 7)
        assert row["kv/bytes_dense"] == each * (sum(prompts.values()) + 2 * 3 * 7)


def test_batches_cover_every_epoch_once_in_an_order_of_its_own():
    def places(seed, steps=range(6), letters="abcdef"):
        cfg = SimpleNamespace(prompts=3, seed=seed)
        return [x for s in steps for x in train.batch_of_step(list(letters), cfg, s)]

    order = places(0)
    epochs = [order[i : i + 6] for i in (0, 6, 12)]
    assert all(sorted(x) == list("abcdef") for x in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert places(1) != order
    assert places(0, [4]) == order[12:15]  # whatever was asked before
    assert places(0) == order
    # No letter twice in an epoch where batches do not fill it; each has its turn in some epoch.
    order = places(0, range(40), "abcdefgh")
    assert all(len(set(order[i : i + 6])) == 6 for i in range(0, 120, 6))
    assert set(order) == set("abcdefgh")


# ---- evaluation ---------------------------------------------------------------------------------


def test_wilson():
    hand = {(0, 10): (0.0, 0.2775), (5, 10): (0.2366, 0.7634), (10, 10): (0.7225, 1.0),
            (128, 256): (0.4392, 0.5608)}
    for (k, n), (low, high) in hand.items():
        assert evaluation.wilson(k, n) == pytest.approx((low, high), abs=6e-5)
    for k in range(257):  # the bounds are the shares p that lie 1.96 deviations from k / n
        for p in evaluation.wilson(k, 256):
            assert (k / 256 - p) ** 2 == pytest.approx(1.959964**2 * p * (1 - p) / 256, abs=1e-12)
    assert evaluation.wilson(0, 256)[0] == pytest.approx(0, abs=1e-12)


def test_evaluate_counts_right_answers(monkeypatch, tok):
    """A sampler that writes: the answer at once with a full cache, sometimes with an evicted one.

    Tokens after the length, and the stop token, must not reach the reward.
    """
    problems = [gsm8k.Problem(i + 40, f"q{i}", str(i * 11)) for i in range(5)]
    encoded = [(p, tok.encode(p.prompt)) for p in problems]
    cfg = Config(policy="recent", keep=0.25, max_new=30, temperature=0.7)
    calls = []

    def fake(model, prompts, *, sequence, G, max_new, stop_ids, eviction, temperature, **rest):
        assert (G, max_new, temperature, stop_ids) == (1, 30, 0.0, tok.stop_ids)
        calls.append((eviction, list(sequence)))
        tokens, lengths = torch.zeros(len(prompts), 1, 30, dtype=torch.int64), []
        for n, s in enumerate(sequence):
            assert prompts[n] == encoded[s - 40][1]
            right = eviction == DENSE or s in (41, 44)
            ids = tok.encode(f"So\n#### {(s - 40) * 11 if right else 7}")
            ids += [tok.control["<|im_end|>"]]
            after = tok.encode("\n#### 7")
            tokens[n, 0, : len(ids + after)] = torch.tensor(ids + after)
            lengths.append([len(ids)])
        stopped = torch.tensor([[s != 44] for s in sequence])
        return SimpleNamespace(tokens=tokens, lengths=torch.tensor(lengths), stopped=stopped)

    monkeypatch.setattr(evaluation, "generate", fake)
    monkeypatch.setattr(evaluation, "BATCH", 2)
    got = evaluation.evaluate(None, tok, encoded, cfg)
    assert list(got) == ["dense", "evicted"]
    assert (got["dense"]["accuracy"], got["evicted"]["accuracy"]) == (1.0, 0.4)
    assert all(x["n"] == 5 and x["truncated"] == 0.2 for x in got.values())
    assert got["evicted"]["interval"] == evaluation.wilson(2, 5)
    batches = [[40, 41], [42, 43], [44]]
    assert calls == [(e, b) for e in (DENSE, cfg.eviction()) for b in batches]
    assert "0.400" in evaluation.describe(got)


def test_eval_program(flags, monkeypatch, capsys, varied, go):
    keep = ("task", "model", "data-dir", "max-new", "window", "sinks", "dtype", "device")
    pairs = iter(flags())
    argv = [x for name, value in zip(pairs, pairs, strict=True) if name[2:] in keep
            for x in (name, value)]
    monkeypatch.setattr(sys, "argv", ["eval.py", *argv, "--limit", "4"])
    evaluation.main()
    text, row = capsys.readouterr().out.splitlines()
    row = json.loads(row)
    assert row["dense"]["n"] == row["evicted"]["n"] == 4 and "n = 4" in text
    x = summary(go(steps=0, limit=4))
    assert x["accuracy_before_dense"] == row["dense"]["accuracy"]
    assert x["accuracy_before_evicted"] == row["evicted"]["accuracy"]
    monkeypatch.setattr(sys, "argv", ["eval.py", *argv, "--limit", "0"])
    with pytest.raises(BadInput, match="--limit 0"):
        evaluation.main()


def test_mismatch_program(tiny, rows, tmp_path):
    done = program(ROOT / "benchmarks/mismatch.py", "--task", "gsm8k", "--model", tiny,
                   "--data-dir", rows, "--limit", TEST_ROWS, "--prompts", 3, "--group", 2,
                   "--max-new", 8, "--window", 4, "--dtype", "fp32", "--device", "cpu",
                   "--keep", 0.3, "--policy", "recent", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shadow, dense = (json.loads(x) for x in done.stdout.splitlines())
    for row, learner in ((shadow, "shadow"), (dense, "dense")):
        assert {k: row[k] for k in ("policy", "keep", "dtype", "learner")} == {
            "policy": "recent", "keep": 0.3, "dtype": "fp32", "learner": learner}
        assert 0 <= row["logp_abs_mean"] <= row["logp_abs_max"] and row["kl"] >= 0
        # 6 samples: one is left out as soon as its smallest ratio is below 1e-4
        assert (row["rejected_frac"] > 0) == (row["ratio_min"] < 1e-4)
    assert shadow["logp_abs_max"] < 2e-5 and dense["logp_abs_mean"] > 1e-2
    assert shadow["kl"] < 1e-3 * dense["kl"]
    assert list(tmp_path.iterdir()) == []


# ---- bad input ----------------------------------------------------------------------------------


def damaged(tiny, rows, tmp_path):
    """Folders with one fault each, made before the run."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    shutil.copytree(tiny, tmp_path / "short")
    (tmp_path / "short/model.safetensors").write_bytes(weights(tiny)[:5000])
    shutil.copytree(rows, tmp_path / "malformed")
    with (tmp_path / "malformed/train.jsonl").open("a") as f:
        f.write('{"question": "q"}\n')
    shutil.copytree(tiny, tmp_path / "weights")  # has a config.json too
    (tmp_path / "empty").mkdir()


BAD = {  # command line -> what the message names
    "no model": ({"model": "nowhere"}, "nowhere"),
    "truncated weights": ({"model": "short"}, "model.safetensors"),
    "no data": ({"data_dir": "nowhere"}, "train.jsonl"),
    "malformed row": ({"data_dir": "malformed"}, "train.jsonl:7"),
    "keep 0": ({"keep": 0}, "--keep 0"),
    "keep 1.5": ({"keep": 1.5}, "--keep 1.5"),
    "keep nan": ({"keep": "nan"}, "--keep nan"),
    "keep text": ({"keep": "half"}, "--keep"),
    "group 1": ({"group": 1}, "--group 1"),
    "prompts 0": ({"prompts": 0}, "--prompts 0"),
    "max-new 0": ({"max_new": 0}, "--max-new 0"),
    "window 0": ({"window": 0}, "--window 0"),
    "steps -1": ({"steps": -1}, "--steps -1"),
    "lr inf": ({"lr": "inf"}, "--lr inf"),
    "lr -1": ({"lr": -1}, "--lr -1"),
    "temperature 0": ({"temperature": 0}, "--temperature 0"),
    "policy": ({"policy": "oracle"}, "--policy"),
    "task": ({"task": "chess"}, "--task"),
    "no task": ({"task": None}, "--task"),
    "loss": ({"loss": "ppo"}, "--loss"),
    "dtype": ({"dtype": "int8"}, "--dtype"),
    "flag": ({"top_k": 5}, "--top-k"),
    "shortened flag": ({"polic": "recent"}, "--polic"),
    "long prompt": ({"max_prompt": 20}, "--max-prompt 20"),
    "limit": ({"limit": TEST_ROWS + 1}, f"--limit {TEST_ROWS + 1}"),
    "eval-during": ({"eval_during": 7, "eval_every": 1}, "--eval-during 7"),
    "cuda": ({"device": "cuda"}, "--device cuda"),
    "device": ({"device": "tpu"}, "--device"),
    "out exists": ({"out": "notes"}, "--out notes"),
    "out is a file": ({"out": "file"}, "--out file"),
    "out below a file": ({"out": "file/run"}, "--out file/run"),
    "overwrite of no run": ({"out": "notes", "overwrite": True}, "--out notes"),
    "overwrite of a model": ({"out": "weights", "overwrite": True}, "--out weights"),
    "resume without out": ({"out": None, "resume": True}, "--resume"),
    "resume and overwrite": ({"resume": True, "overwrite": True}, "--resume"),
    "resume of nothing": ({"out": "nowhere", "resume": True}, "nowhere"),
    "resume of an empty folder": ({"out": "empty", "resume": True}, "empty"),
    "resume of other files": ({"out": "notes", "resume": True}, "notes"),
}


def tree(folder):
    return {p.relative_to(folder): p.read_bytes() if p.is_file() else None
            for p in folder.rglob("*")}


def assert_refused(argv, names, capsys, folder):
    before = tree(folder)
    with pytest.raises(SystemExit) as e:
        cli(argv)
    assert e.value.code == 2
    error = capsys.readouterr().err.splitlines()
    assert names in error[-1] and "error: " in error[-1], error
    # argparse puts its usage before the line
    assert len(error) == 1 or error[0].startswith("usage: "), error
    assert [x for x in error if "error: " in x] == error[-1:]
    assert tree(folder) == before, "something was written"


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, flags, tiny, rows, tmp_path, capsys, monkeypatch):
    more, names = BAD[case]
    damaged(tiny, rows, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "eval_during" not in more:
        more = {**more, "eval_during": None}  # its default is more than there is, but not asked for
    assert_refused(flags(**more), names, capsys, tmp_path)


def test_bad_input_on_resume(go, flags, varied, capsys, tmp_path):
    out = go(save_every=2)
    capsys.readouterr()
    for more, names in (({"lr": 2e-3}, "lr"), ({"seed": 1}, "seed"), ({"group": 2}, "group"),
                        ({"dtype": "bf16"}, "dtype"), ({"steps": 3}, "--steps 3")):
        more = {"save_every": 2, "resume": True, **more}
        assert_refused(flags(**more), names, capsys, tmp_path)
    assert_refused(flags(save_every=2), "--out", capsys, tmp_path)  # neither --resume nor the other
    text = (out / "config.json").read_text()
    for damage in (lambda path: path.write_text(text[:50]), Path.unlink):
        damage(out / "config.json")
        assert_refused(flags(save_every=2, resume=True), "config.json", capsys, tmp_path)
    (out / "config.json").write_text(text)
    go(save_every=2, resume=True, steps=6)
    assert len(metrics(out)) == 6
    assert json.loads((out / "config.json").read_text())["steps"] == 6  # as resolved last


def test_bad_input_from_the_shell(flags, tmp_path):
    for argv, names in (([ROOT / "train.py", *flags(model="nowhere")], "nowhere"),
                        ([ROOT / "eval.py", "--task", "gsm8k", "--keep", "0"], "--keep 0")):
        done = program(*argv, cwd=tmp_path)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and line.startswith("error: ") and names in line
        assert done.stdout == "" and list(tmp_path.iterdir()) == []


def test_help_names_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as e:
        parse(["--help"], train.__doc__)
    assert e.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for f in dataclasses.fields(Config):
        assert f"--{f.name.replace('_', '-')}" in text and f.metadata["help"] in text
    assert text.count("(default: ") == len(dataclasses.fields(Config))


def test_defaults_follow_the_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    small, real = parse(["--task", "gsm8k"], "x"), parse(["--task", "gsm8k", "--model", "F"], "x")
    assert (small.dtype, small.lr, small.control) == ("fp32", 1e-4, True)
    assert (real.dtype, real.lr, real.control) == ("bf16", 1e-6, False)
    given = parse(["--task", "gsm8k", "--model", "F", "--lr", "0", "--control"], "x")
    assert given.lr == 0 and given.control
    assert small.out.startswith("out/gsm8k-") and list(tmp_path.iterdir()) == []
    assert parse(["--task", "gsm8k"], "x").out != small.out


# ---- the generated stories ----------------------------------------------------------------------

STORIES = {  # what a story's text says -> its answer
    r"(\w+) has (\d+) \w+\..*\1 buys (\d+) more.*Then \1 gives (\d+) .*does \1 have now":
        lambda a, b, c: a + b - c,
    r"(\w+) has (\d+) \w+\..*(?:\w+) has (\d+) more \w+ than \1\..*do \1 and":
        lambda a, b: a + a + b,
    r"(At) the shop \w+ cost (\d+) .* takes (\d+) dollars along.* buys (\d+) \w+\..*have left":
        lambda a, c, b: c - a * b,
    r"(\w+) fills (\d+) boxes with (\d+) .*\1 loses (\d+) .*does \1 still have":
        lambda a, b, c: a * b - c,
    r"(\w+) has (\d+) \w+\..*\1 gives half .*Then \1 finds (\d+) .*does \1 have in the end":
        lambda a, b: a // 2 + b,
    r"(\w+) starts with (\d+) .*\1 finds (\d+) \w+ each day.* for (\d+) days.*does \1 have after":
        lambda c, a, b: c + a * b,
    r"(\w+) has (\d+) \w+\..*has (\d+) more \w+ than \1\..*has (\d+) fewer .*do \1 and":
        lambda a, b, c: a + (a + b - c),
    r"(\w+) buys (\d+) \w+ for (\d+) dollars.*\1 buys (\d+) bags for (\d+) .*\1 had (\d+) .*left":
        lambda a, p, b, q, c: c - a * p - b * q,
}


def solve(question):
    """Answers by every pattern that fits: `has more` alone and with `fewer` are told apart."""
    fits = {pattern: m for pattern in STORIES if (m := re.search(pattern, question))}
    if len(fits) == 2:
        fits = {p: m for p, m in fits.items() if "fewer" in p}
    ((pattern, m),) = fits.items()
    return STORIES[pattern](*map(int, m.groups()[1:])), pattern


def interpret(solution):
    """Work the equations of a solution out again; returns the number after ####."""
    work, answer = re.fullmatch(r"(.*)\n#### (\d+)", solution).groups()
    known = None
    for part in work.removesuffix(".").split(". "):
        a, op, b, c = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", part).groups()
        a, b, known = int(a), int(b), int(c)
        assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[op] == known >= 0
    assert known == int(answer)
    return known


@pytest.fixture(scope="module")
def problems():
    return {split: stories.load(split) for split in ("train", "test")}


def test_stories_are_always_the_same_and_never_shared(problems):
    train_, test = problems["train"], problems["test"]
    assert (len(train_), len(test)) == (4096, 1024)
    for split, all_of_them in problems.items():
        assert [p.index for p in all_of_them] == list(range(len(all_of_them)))
        random.seed(5)  # nothing global plays a part
        assert [stories.problem(split, i) for i in (1000, 3, 7)] == [
            all_of_them[i] for i in (1000, 3, 7)]
    prompts = [p.prompt for p in train_ + test]
    assert len(set(prompts)) == len(prompts)
    answers = Counter(p.answer for p in test)
    assert answers.most_common(1)[0][1] < 0.08 * len(test)  # no constant answer is worth much


def test_answers_of_stories(problems):
    kinds = Counter()
    for split, some in (("train", problems["train"][:600]), ("test", problems["test"])):
        for p in some:
            head, *examples, question = p.prompt.split("\n\nQuestion: ")
            assert head == stories.INSTRUCTION and len(examples) == 2
            number, kind = solve(question)
            kinds[kind] += 1
            assert number == int(p.answer), p
            for text in examples:
                text, solution = text.split("\nAnswer: ")
                assert solve(text)[0] == interpret(solution)
            r = random.Random(f"{split} {p.index}")
            told, steps, _ = stories.story(r, r.randint(1, 3))
            assert told == question and interpret(stories.solution(steps)) == number
            assert 2 <= len(steps) <= 4
            assert gsm8k.reward(stories.solution(steps), p) == 1
            assert gsm8k.reward(stories.work(steps), p) == 1
            assert gsm8k.reward(f"#### {number + 1}", p) == 0
    assert len(kinds) == len(STORIES) and min(kinds.values()) > 100


def test_the_checking_form_is_worth_nothing():
    """What the embedded model often writes at first: its last number is not the answer."""
    forms, r = Counter(), random.Random("form")
    for i in range(2000):
        question, steps, kind = stories.story(r, 1)
        text = pretrain.final_answer(r, steps, kind)
        problem = gsm8k.Problem(i, question, str(stories.result(steps[-1])))
        assert gsm8k.reward(text, problem) == float("####" in text), text
        forms[kind, "Check:" in text] += 1
    assert len(forms) == 2 * len(STORIES) and min(forms.values()) > 20


def test_tokens_of_stories(problems, tok):
    digit = {tok.encode(str(n))[0]: str(n) for n in range(10)}
    assert len(digit) == 10
    has_digit = {i for i in range(tok.vocab_size) if re.search(r"\d", tok.decode([i]))}
    assert has_digit == set(digit), "a token holds a digit and more"
    for p in problems["train"] + problems["test"]:
        ids = tok.chat(p.prompt)
        assert 100 <= len(ids) <= 400
        assert "".join(digit[i] for i in ids if i in digit) == re.sub(r"\D", "", p.prompt)


# ---- commands of the README and the recipes -----------------------------------------------------


def commands():
    """(file, words) of every `python X.py ...`; words with variables of the shell are left out."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "runs").glob("*.sh"))]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ") if path.exists() else ""
        for part in re.split(r"&&|;|\||\n", text):
            m = re.fullmatch(r"\s*(?:\w+=\S*\s+)*(?:\S*/)?python3? (\S+\.py\b[^>`]*).*", part)
            words = shlex.split(m[1], comments=True) if m else []
            while variables := [i for i, x in enumerate(words) if "$" in x]:
                i = variables[0]
                del words[i - (words[i] != "$@" and words[i - 1].startswith("--")) : i + 1]
            found += [(path.name, words)] if words else []
    return found


@pytest.mark.parametrize("file, words", commands(), ids=lambda x: x if isinstance(x, str) else "")
def test_commands_that_are_written_down(file, words, tiny, rows, tmp_path, monkeypatch, varied):
    """Flags are those the program has; a training command runs for a step on the tiny model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    script, argv = words[0], words[1:]
    assert (ROOT / script).is_file(), f"{file}: {script}"
    if script == "train.py":
        cfg = parse([x for x in argv if x != "--resume"], "x")
        train.run(dataclasses.replace(
            cfg, model=str(tiny), data_dir=str(rows), out=str(tmp_path / "run"), steps=1, prompts=2,
            group=2, max_new=4, limit=2, eval_during=2, shots=0, device="cpu", dtype="fp32"))
        assert summary(tmp_path / "run")["steps"] == 1
    elif script == "eval.py":
        parse(argv, "x", evaluation.FLAGS)
    elif script in ("benchmarks/show.py", "benchmarks/mismatch.py", "benchmarks/reasoning.py",
                    "benchmarks/memory_plan.py"):
        program = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        parse(argv, "x", program.FLAGS, getattr(program, "Flags", Config))
    else:
        text = (ROOT / script).read_text(encoding="utf-8")
        for flag in (x.partition("=")[0] for x in argv if x.startswith("--")):
            assert f'"{flag}"' in text, f"{file}: {script} has no {flag}"


def test_written_commands_are_found():
    if not (ROOT / "README.md").exists():
        pytest.skip("no README.md")
    scripts = {words[0] for file, words in commands() if file == "README.md"}
    assert {"train.py", "eval.py"} <= scripts


# ---- a real model -------------------------------------------------------------------------------


@pytest.mark.weights
@pytest.mark.skipif("SMD_MODEL" not in os.environ, reason="SMD_MODEL names no checkpoint folder")
def test_two_steps_of_a_real_model(rows, tmp_path):
    """On few rows, all at the defaults of a real model."""
    model = os.environ["SMD_MODEL"]
    train.run(parse(["--task", "gsm8k", "--model", model, "--out", str(tmp_path / "run"),
                     "--data-dir", str(rows), "--steps", "2",
                     "--prompts", "2", "--group", "4", "--max-new", "96", "--limit", "0",
                     "--eval-every", "0"], train.__doc__))
    for row in metrics(tmp_path / "run"):
        assert row["step/skipped"] == 0 and 0 < row["grad/norm"] < math.inf
        assert row["mismatch/logp_abs_mean"] < 0.03 and row["kv/bytes_peak"] < row["kv/bytes_dense"]
        assert row["distill/kl"] > 10 * row["mismatch/kl"]
    masters = saved(tmp_path / "run")["optim"]["masters"]
    before = load_model(model, dtype=torch.bfloat16).parameters()
    moved = [(m.cpu() != p.detach().float()).float().mean().item()
             for m, p in zip(masters, before, strict=True)]
    assert min(moved) > 0.1 and sum(moved) / len(moved) > 0.5
