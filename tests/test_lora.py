"""LoRA: what adapters compute, their gradients, their files here and in PEFT, runs with them."""

import copy
import json
import shutil

import pytest
import torch
from test_grpo import F64, REWARDS, gap, sampled, tiny_model
from test_train import (  # noqa: F401 (fixtures)
    assert_same_run,
    flags,
    go,
    last,
    metrics,
    rows,
    same,
    summary,
    tiny,
    tok,
    varied,
)

import eval as evaluation
import train
from config import parse
from errors import BadInput
from grpo import Objective, backward
from lora import Initial, adapters, add_lora, load_adapters, merged, save_adapters
from model import causal, load_model

IDS = torch.randint(0, 9, (2, 9), generator=torch.Generator().manual_seed(0))


def logits(model, ids=IDS):
    pos = torch.arange(ids.shape[1]).expand(len(ids), -1)
    return model.logits(model(ids, pos, causal)).detach()


def adapted(dtype=F64, scale=1.0, **more):
    """A tiny model with adapters that do something."""
    model = tiny_model(dtype, **more)
    add_lora(model, 3, 6.0, seed=0)
    draw = torch.Generator().manual_seed(1)
    for m in adapters(model).values():
        m.lora_B.data.copy_(scale * torch.randn(m.lora_B.shape, generator=draw))
    return model


def test_new_adapters_change_nothing_and_all_linear_layers_have_one():
    model = tiny_model()
    before = logits(model)
    add_lora(model, 2, 4.0, seed=0)
    assert torch.equal(logits(model), before)
    assert len(adapters(model)) == 7 * model.cfg.L
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.lora_{x}" for name in adapters(model) for x in "AB"}
    assert tiny_model(torch.bfloat16).layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    half = adapted(torch.bfloat16)
    assert {m.lora_A.dtype for m in adapters(half).values()} == {torch.float32}


def test_with_the_adapters_off_it_is_the_initial_model():
    model, before = adapted(), logits(tiny_model())
    assert gap(logits(model), before) > 1e-2
    assert torch.equal(logits(Initial(model)), before)
    with pytest.raises(ZeroDivisionError):
        Initial(model)(IDS, IDS, lambda *a: 1 / 0)
    assert gap(logits(model), before) > 1e-2, "on again, whatever happened"


def test_merged_weights_compute_the_same():
    model, plain = adapted(), tiny_model()
    plain.load_state_dict(merged(model))
    assert gap(logits(plain), logits(model)) < 1e-12
    plain.load_state_dict(merged(adapted(scale=0.0)))
    assert gap(logits(plain), logits(model)) > 1e-2  # the control


def test_gradients_are_those_of_the_merged_weights():
    """dB = s dW A^T, dA = s B^T dW; and the teacher is the model with its adapters off."""
    model, plain = adapted(), tiny_model()
    plain.load_state_dict(merged(model))
    rollout, o = sampled(model), Objective(lam=0.5)
    told = backward(model, rollout, REWARDS, o, None, Initial(model))
    want = backward(plain, rollout, REWARDS, o, None, tiny_model())
    assert told["distill/kl"] == pytest.approx(want["distill/kl"], rel=1e-9)
    weights = dict(plain.named_parameters())
    for name, m in adapters(model).items():
        grad = weights[f"{name}.weight"].grad
        assert gap(m.lora_B.grad, m.scale * grad @ m.lora_A.T) < 1e-9
        assert gap(m.lora_A.grad, m.scale * m.lora_B.T @ grad) < 1e-9
        assert m.lora_A.grad.abs().max() > 1e-6
    assert all(p.grad is None for name, p in model.named_parameters() if ".lora_" not in name)


def test_peft_reads_the_folder(go, tiny, tok, varied, tmp_path):  # noqa: F811
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    out = go(lora_rank=2, lora_alpha=6, save_merged=True, lr=0.05)
    _, model = evaluation.load(parse(["--task", "gsm8k", "--model", str(last(out)), "--dtype",
                                      "fp32"], "x"))
    ids = torch.tensor([tok.chat("How many pens?")])
    ours = logits(model, ids)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    assert gap(base(ids).logits, ours) > 1e-2
    theirs = peft.PeftModel.from_pretrained(base, last(out))
    assert gap(theirs(ids).logits, ours) < 1e-4
    whole = transformers.AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    assert gap(whole(ids).logits, ours) < 1e-4
    assert gap(logits(load_model(out / "merged", dtype=torch.float32), ids), ours) < 1e-4


def test_a_run_trains_the_adapters_and_resumes(go, tiny, varied, monkeypatch):  # noqa: F811
    once, taught = train.backward, []

    def spy(model, *args):
        taught.append((model, args[-1]))
        return once(model, *args)

    monkeypatch.setattr(train, "backward", spy)
    options = {"lora_rank": 2, "lam": 0.5, "keep": 0.3, "control": True, "save_every": 1,
               "eval_every": 2, "limit": 2}
    whole = go("whole", **options)
    assert all(isinstance(teacher, Initial) and teacher.model is m for m, teacher in taught)
    kept = {name: p for name, p in load_model(tiny, dtype=torch.float32).named_parameters()}
    for name, p in taught[0][0].named_parameters():
        assert ".lora_" in name or torch.equal(p, kept[name])
    assert any(m.lora_B.any() for m in adapters(taught[0][0]).values())
    assert not (last(whole) / "model.safetensors").exists()
    go("part", **{**options, "steps": 2})
    part = go("part", resume=True, **options)
    assert metrics(whole) == metrics(part) and summary(whole)["scores_after_dense"] == summary(
        part)["scores_after_dense"]
    a, b = ((last(x) / "adapter_model.safetensors").read_bytes() for x in (whole, part))
    assert a == b


def test_bad_input(go, varied, tmp_path, capsys):  # noqa: F811
    for argv, line in (["--lora-rank", "0"], "--lora-rank 0: expected a number of at least 1"), (
            ["--lora-alpha", "2"], "expected --lora-rank"), (["--save-merged"], "--lora-rank"):
        with pytest.raises(BadInput, match=line):
            parse(["--task", "gsm8k", *argv], "x")
    out = go(lora_rank=2, steps=1)
    with pytest.raises(BadInput, match="adapters; train on from a whole model"):
        go("again", model=last(out))
    other = copy.deepcopy(tiny_model(torch.float32))
    with pytest.raises(BadInput, match="adapter_model.safetensors: .*expected the LoRA adapters"):
        load_adapters(other, last(out))
    damaged = tmp_path / "damaged"
    shutil.copytree(last(out), damaged)
    (damaged / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(BadInput, match="expected the LoRA adapters"):
        load_adapters(tiny_model(torch.float32), damaged)
    model = adapted(torch.float32)
    save_adapters(model, damaged, "base")
    again = tiny_model(torch.float32)
    load_adapters(again, damaged)
    assert same(list(model.parameters()), list(again.parameters()))
    config = json.loads((damaged / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 6, "base")


def test_the_learning_rate_is_ten_times_as_high():
    assert parse(["--task", "gsm8k", "--model", "x", "--lora-rank", "8"], "x").lr == 1e-5
    cfg = parse(["--task", "gsm8k", "--lora-rank", "8", "--lr", "1e-3"], "x")
    assert (cfg.lr, cfg.lora_alpha) == (1e-3, 16)
