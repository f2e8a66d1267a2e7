"""benchmarks/gpu_check.py: the whole script on a tiny shape, and on a GPU where there is one."""

import sys

import pytest
import torch

from benchmarks import big_checkpoint, gpu_check
from data import stories
from errors import BadInput
from model import load_model


@pytest.mark.parametrize("shape, device", [
    ("tiny", "cpu"),
    pytest.param("4b", "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no CUDA device")])])
def test_every_check_is_fine(shape, device, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--shape", shape, "--device", device])
    assert gpu_check.main() == 0
    table = capsys.readouterr().out.partition("| check | seen | fine |")[2]
    assert table.count("| yes |") == 12 and "NO" not in table


def test_a_big_checkpoint_is_written_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(big_checkpoint, "SHARD_BYTES", 10**5)
    big_checkpoint.write("tiny", stories.MODEL, tmp_path)
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and max(p.stat().st_size for p in shards) < 10**5 + 10**4
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert 0.019 < model.layers[2].mlp.up_proj.weight.float().std() < 0.021
    (tmp_path / shards[1].name).unlink()
    with pytest.raises(BadInput, match=shards[1].name):
        load_model(tmp_path, dtype=torch.bfloat16)


def test_a_check_that_fails_is_told_and_the_others_go_on(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--shape", "tiny", "--device", "cpu"])
    monkeypatch.setattr(gpu_check, "backward", broken)
    monkeypatch.setattr(gpu_check, "BOUNDS", {torch.float32: 1e-9})
    assert gpu_check.main() == 1
    table = capsys.readouterr().out.partition("| check | seen | fine |")[2]
    assert "gradients | RuntimeError: no kernel for this | NO |" in table
    assert table.count("| NO |") == 4 and "decoding" in table
