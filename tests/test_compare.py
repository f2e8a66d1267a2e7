"""benchmarks/compare.py: its table, against numbers worked out by hand."""

import json
import math
import re

import pytest

from benchmarks import compare
from errors import BadInput

CONFIG = {"task": "gsm8k", "keep": 0.3, "lr": 1e-4, "out": "x", "torch": "2"}


def write(folder, method, seed, scores, rejected=0.0):
    folder.mkdir(parents=True)
    mean = sum(scores) / len(scores)
    summary = {f"{key}_after_{cache}": value for cache in ("dense", "evicted")
               for key, value in (("accuracy", mean), ("scores", scores))}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "method": method, "seed": seed}))
    (folder / "summary.json").write_text(json.dumps({"mismatch_logp_abs_max": 0.5, **summary}))
    (folder / "metrics.jsonl").write_text("".join(
        json.dumps({"step": s, "reward/mean": s / 4, "mismatch/rejected_frac": rejected}) + "\n"
        for s in (1, 2)))


@pytest.fixture
def runs(tmp_path):
    for seed, (a, b) in enumerate((([0, 0, 1, 1], [1, 0, 1, 1]), ([0, 1, 0, 0], [1, 1, 1, 0]),
                                   ([1, 0, 0, 0], [1, 0, 0, 0]))):
        write(tmp_path / "runs" / f"naive-{seed}", "naive", seed, a)
        write(tmp_path / "runs" / f"smd-{seed}", "smd", seed, b, rejected=0.25)
    return tmp_path / "runs"


def test_table_by_hand(runs):
    lines = compare.table(compare.rows_of(compare.read_runs([runs]))).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["method=naive", "method=smd"]
    # naive .5 .25 .25: mean .3333, deviation .1443, t(2) 4.303 / sqrt(3); smd .75 .75 .25
    assert re.findall(r"\d\.\d+", lines[1])[:2] == ["0.333", "0.359"]
    assert re.findall(r"\d\.\d+", lines[2])[:2] == ["0.583", "0.717"]
    # pairs by seed: +.25 +.5 0
    assert "+0.250 +-0.621" in lines[2] and "+0.000 +-0.000" in lines[1]
    assert lines[2].split()[-1] == "0.2500" and lines[2].split()[-2] == "0.5"


def test_intervals():
    assert compare.mean_and_half([1.0, 3.0]) == (2.0, pytest.approx(12.706 * math.sqrt(2 / 2)))
    mean, half = compare.mean_and_half([1.0])
    assert mean == 1 and math.isnan(half)


def test_bad_input(runs, tmp_path):
    with pytest.raises(BadInput, match="no finished run"):
        compare.read_runs([tmp_path / "empty"])
    write(runs / "again", "smd", 0, [1, 1, 1, 1])
    with pytest.raises(BadInput, match="seeds .* repeat"):
        compare.rows_of(compare.read_runs([runs]))


def test_curves(runs, tmp_path):
    pytest.importorskip("matplotlib")
    compare.draw(compare.rows_of(compare.read_runs([runs])), tmp_path / "png")
    assert [p.name for p in (tmp_path / "png").iterdir()] == ["reward_mean.png"], "what is logged"
    assert (tmp_path / "png" / "reward_mean.png").stat().st_size > 5000
