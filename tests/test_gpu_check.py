"""benchmarks/gpu_check.py: the whole script on a tiny shape, and on a GPU where there is one."""

import sys

import pytest
import torch

from benchmarks import gpu_check


@pytest.mark.parametrize("shape, device", [
    ("tiny", "cpu"),
    pytest.param("4b", "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no CUDA device")])])
def test_every_check_is_fine(shape, device, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--shape", shape, "--device", device])
    assert gpu_check.main() == 0
    table = capsys.readouterr().out.partition("| check | seen | fine |")[2]
    assert table.count("| yes |") == 12 and "NO" not in table


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
