"""benchmarks/compare.py: its table, against numbers worked out by hand."""

import json
import math

import pytest

from benchmarks import compare
from errors import BadInput

CONFIG = {"task": "gsm8k", "model": None, "steps": 2, "keep": 0.3, "lr": 1e-4, "control": False,
          "out": "x", "torch": "2"}


def write(folder, method, seed, scores, rejected=0.0):
    folder.mkdir(parents=True)
    mean = sum(scores) / len(scores)
    summary = {f"{key}_{when}_{cache}": value for cache in ("dense", "evicted")
               for key, value in (("accuracy", mean), ("scores", scores))
               for when in ("before", "after")}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "method": method, "seed": seed}))
    (folder / "summary.json").write_text(json.dumps({"seconds": 60 * seed, **summary}))
    (folder / "metrics.jsonl").write_text("".join(
        json.dumps({"step": s, "reward/mean": s / 4 + seed, "mismatch/rejected_frac": rejected,
                    "mismatch/kl": None if s == 1 else 0.5 * seed,
                    "mismatch/ratio_min": 10.0 ** -seed}) + "\n" for s in (1, 2)))


@pytest.fixture
def runs(tmp_path):
    for seed, (a, b) in enumerate((([0, 0, 1, 1], [1, 0, 1, 1]), ([0, 1, 0, 0], [1, 1, 1, 0]),
                                   ([1, 0, 0, 0], [1, 0, 0, 0]))):
        write(tmp_path / "runs" / f"naive-{seed}", "naive", seed, a)
        write(tmp_path / "runs" / f"smd-{seed}", "smd", seed, b, rejected=0.25)
    return tmp_path / "runs"


def test_table_by_hand(runs):
    head, _, naive, smd, _, *commands = compare.table(
        compare.rows_of(compare.read_runs([runs]))).splitlines()
    head, naive, smd = ([x.strip() for x in row.strip("|").split("|")]
                        for row in (head, naive, smd))
    assert head == list(compare.HEAD) and len(naive) == len(smd) == len(head)
    row = dict(zip(head, smd, strict=True))
    # naive .5 .25 .25: mean .3333, deviation .1443, t(2) 4.303 / sqrt(3); smd .75 .75 .25
    assert naive[:3] == ["method=naive", "3", "2"] and naive[4] == "0.333 ±0.359"
    assert row["dense after"] == row["evicted after"] == "0.583 ±0.717"
    # pairs by seed: +.25 +.5 0
    assert row["dense, less the first"] == "+0.250 ±0.621" and naive[7] == "+0.000 ±0.000"
    # what was not logged is in no mean
    assert (row["k3"], row["min ratio"], row["rejected"]) == ("0.5", "0.01", "0.25")
    assert row["minutes"] == "1.0" and row["mean abs d logp"] == "-"
    assert commands[0] == ("    python train.py --task gsm8k --method naive --steps 2 --keep 0.3 "
                           "--no-control"), "--lr is the default"


def test_intervals():
    assert compare.mean_and_half([1.0, 3.0]) == (2.0, pytest.approx(12.706 * math.sqrt(2 / 2)))
    mean, half = compare.mean_and_half([1.0])
    assert mean == 1 and math.isnan(half)


def test_bad_input(runs, tmp_path):
    with pytest.raises(BadInput, match="empty: no run there"):
        compare.read_runs([runs, tmp_path / "empty"])
    write(runs / "again", "smd", 0, [1, 1, 1, 1])
    with pytest.raises(BadInput, match="seeds .* repeat"):
        compare.rows_of(compare.read_runs([runs]))


def cells(*lines):
    return [[x.strip() for x in row.strip("|").split("|")] for row in lines]


def test_a_run_that_broke_off_stays_in_the_table(runs):
    (runs / "smd-1" / "summary.json").unlink()
    with (runs / "smd-2" / "metrics.jsonl").open("a") as f:
        f.write('{"step": 3, "mismatch/rejected_frac": 0.75}\n')
    naive, smd = cells(*compare.table(compare.rows_of(compare.read_runs([runs]))).splitlines()[2:4])
    assert naive[1] == "3" and smd[1] == "2 of 3" and smd[4].startswith("0.500")
    assert smd[13] == "0.32"  # (6 x 0.25 + 0.75) / 7
    for seed in (0, 2):
        (runs / f"smd-{seed}" / "summary.json").unlink()
    assert cells(*compare.table(compare.rows_of(compare.read_runs([runs]))).splitlines()[3:4])[0][
        1:5] == ["0 of 3", "-", "-", "-"]
    (runs / "smd-0" / "metrics.jsonl").write_text('{"step": 1')
    with pytest.raises(BadInput, match="metrics.jsonl: .*a line was cut"):
        compare.read_runs([runs])


def test_other_problems_have_no_paired_difference(runs):
    for seed in range(3):
        config = runs / f"smd-{seed}" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "shots": 4}))
    (smd,) = cells(compare.table(compare.rows_of(compare.read_runs([runs]))).splitlines()[3])
    assert smd[7:9] == ["-", "-"] and smd[4] == "0.583 ±0.717"


def test_a_command_that_a_shell_reads():
    config = {"task": "gsm8k", "model": "/my model", "method": "smd", "keep": 0.3, "control": True}
    assert compare.command(config) == (
        "python train.py --task gsm8k --method smd --model '/my model' --keep 0.3 --control")
    config = {"task": "gsm8k", "model": None, "method": "smd", "lam": 0.0, "teacher": None}
    assert compare.command(config) == "python train.py --task gsm8k --method smd --lam 0.0"


def test_curves(runs, tmp_path):
    pytest.importorskip("matplotlib")
    compare.draw(compare.rows_of(compare.read_runs([runs])), tmp_path / "png")
    assert sorted(p.name for p in (tmp_path / "png").iterdir()) == [
        "ends.png", "mismatch_kl.png", "reward_mean.png"], "what is logged"
    assert (tmp_path / "png" / "reward_mean.png").stat().st_size > 5000
