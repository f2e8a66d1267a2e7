"""The memory plan: its counts, its sums against what a run measures, and what it refuses."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_grpo import tiny_model

import plan
from benchmarks import memory_plan as program
from benchmarks.gpu_check import SHAPES
from config import parse
from data import stories
from errors import BadInput
from lora import add_lora
from model import ModelConfig, Qwen
from plan import check_memory, flags_that_fit, kv_bytes, memory_plan, parameters
from rollout import generate

ROOT = Path(__file__).resolve().parents[1]
QWEN3_4B = ModelConfig.from_hf(SHAPES["4b"])


@pytest.mark.parametrize("kind, tied", [("qwen2", True), ("qwen2", False), ("qwen3", False)])
def test_parameters_are_those_of_the_model(kind, tied):
    hf = {**SHAPES["tiny"], "model_type": kind, "tie_word_embeddings": tied}
    with torch.device("meta"):
        model = Qwen(ModelConfig.from_hf(hf))
        whole = sum(p.numel() for p in model.parameters())
    model = model.to_empty(device="cpu")
    add_lora(model, 3, 6.0, 0)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert parameters(model.cfg) == (whole, adapters // 3) and adapters % 3 == 0
    assert 4.02e9 < parameters(QWEN3_4B)[0] < 4.03e9


@pytest.mark.parametrize("flags", [
    ["--keep", "1"], ["--keep", "0.3"], ["--keep", "0.5", "--layer-budget", "pyramid"],
    ["--budget", "24", "--evict-every", "5"], ["--policy", "h2o", "--budget", "90"]])
def test_the_cache_has_the_planned_size(flags):
    cfg = parse(["--task", "gsm8k", "--prompts", "2", "--group", "3", "--max-new", "20",
                 "--window", "4", "--sinks", "2", *flags], "x")
    model, P = tiny_model(torch.float32), 50
    ids = torch.randint(model.cfg.V, (2, P), generator=torch.Generator().manual_seed(0)).tolist()
    rollout = generate(model, ids, sequence=[0, 1], G=3, max_new=20, stop_ids=frozenset(),
                       eviction=cfg.eviction())
    prefill = 2 * model.cfg.L * model.cfg.Hkv * model.cfg.D * 4 * 2 * P
    planned = kv_bytes(cfg, model.cfg, P, cfg.eviction())
    assert rollout.kv_bytes_peak == planned or (
        cfg.budget and planned < rollout.kv_bytes_peak == prefill), "prefill in one piece"
    assert kv_bytes(cfg, model.cfg, P, plan.DENSE) == rollout.kv_bytes_dense


def measured(tmp_path, *flags):
    """Peak bytes of both phases of a real process, and its plan for the prompts that it saw."""
    argv = ["--task", "gsm8k", "--steps", "2", "--limit", "0", "--eval-every", "0", "--no-control",
            "--save-every", "0", "--out", str(tmp_path / "run"), *flags]
    # The threshold: the C library returns at once what is freed, and what is seen is what is used.
    subprocess.run([sys.executable, "train.py", *argv], cwd=ROOT, check=True, capture_output=True,
                   env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"})
    rows, samples = ([json.loads(x) for x in (tmp_path / "run" / name).read_text().splitlines()]
                     for name in ("metrics.jsonl", "samples.jsonl"))
    cfg = parse(argv, "x")
    shape = json.loads((Path(cfg.model or stories.MODEL) / "config.json").read_text())
    planned = memory_plan(cfg, ModelConfig.from_hf(shape), max(x["prompt_tok"] for x in samples))
    # The rollout of the second step: then the optimiser has its moments.
    return [(planned.peak(phase), rows[-1][f"mem/{phase}_bytes_peak"])
            for phase in ("rollout", "learner")]


@pytest.mark.skipif(sys.platform != "linux", reason="resident peaks are read from /proc")
def test_the_plan_is_near_what_the_embedded_model_takes(tmp_path):
    for planned, seen in measured(tmp_path):
        assert seen / 1.15 < planned < seen * 1.15


@pytest.mark.weights
@pytest.mark.skipif("SMD_MODEL" not in os.environ or "SMD_DATA" not in os.environ,
                    reason="SMD_MODEL and SMD_DATA name no checkpoint and no folder of rows")
@pytest.mark.parametrize("lora", [[], ["--lora-rank", "16"]])
def test_the_plan_is_near_what_a_real_model_takes(lora, tmp_path):
    pairs = measured(tmp_path, "--model", os.environ["SMD_MODEL"], "--data-dir",
                     f"{os.environ['SMD_DATA']}/gsm8k", "--prompts", "2", "--group", "4",
                     "--max-new", "48", *lora)
    for planned, seen in pairs:
        assert seen / 1.15 < planned < seen * 1.15


def config(*flags):
    return parse(["--task", "gsm8k", "--model", "x", *flags], "x")


@pytest.mark.parametrize("task, P", [("gsm8k", 1024), ("hotpotqa", 2048), ("tldr", 1024),
                                     ("govreport", 9000)])
def test_a_4b_fits_where_the_readme_says(task, P):
    small = config("--task", task, "--lora-rank", "16")
    assert "of 24.0 GB" in check_memory(small, QWEN3_4B, P, 24 * 10**9)
    if task != "govreport":
        check_memory(config("--task", task), QWEN3_4B, P, 85 * 10**9)


def test_what_does_not_fit_is_refused_with_flags_that_do():
    cfg, P = config(), 1024
    with pytest.raises(BadInput, match=r"needs about \d+\.\d GB, cpu has 24\.0 GB; this would fit: "
                                       r"(--\S+ ?\S*)") as e:
        check_memory(cfg, QWEN3_4B, P, 24 * 10**9)
    asked = str(e.value).partition("fit: ")[2].split()
    check_memory(config(*asked), QWEN3_4B, P, 24 * 10**9)
    assert asked == ["--lora-rank", "16"], "and no more than it takes"
    with pytest.raises(BadInput, match="a smaller model or a larger device"):
        check_memory(cfg, QWEN3_4B, P, 10**9)
    assert flags_that_fit(dataclasses.replace(cfg, checkpointing=False), QWEN3_4B, P,
                          85 * 10**9) == "--checkpointing"


def test_train_refuses_before_it_loads_weights(monkeypatch, tmp_path):
    import train
    monkeypatch.setattr(plan, "device_bytes", lambda device: 10**8)
    monkeypatch.setattr(train, "load", lambda *a: pytest.fail("weights were loaded"))
    with pytest.raises(BadInput, match="cpu has 0.1 GB"):
        train.run(parse(["--task", "gsm8k", "--out", str(tmp_path / "run")], "x"))
    assert not (tmp_path / "run").exists()


def test_the_program_reads_config_json_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["4b"]))
    argv = ["memory_plan.py", "--task", "govreport", "--model", str(tmp_path), "--lora-rank", "16"]
    monkeypatch.setattr(sys, "argv", [*argv, "--device-gb", "24"])
    program.main()
    told = capsys.readouterr().out
    assert "weights 8.0" in told and "KV cache without eviction 13.4" in told
    monkeypatch.setattr(sys, "argv", [*argv, "--device-gb", "9"])
    with pytest.raises(BadInput, match="has 9.0 GB"):
        program.main()
