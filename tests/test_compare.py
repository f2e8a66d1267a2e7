"""benchmarks/compare.py: its table, against numbers worked out by hand."""

import dataclasses
import json
import math

import pytest

from benchmarks import compare
from config import parse
from errors import BadInput

CONFIG = {"task": "gsm8k", "model": None, "steps": 2, "keep": 0.3, "lr": 1e-4, "control": False,
          "out": "x", "torch": "2"}


def write(folder, method, seed, scores, rejected=0.0):
    """Under the evicted cache the first problem is always wrong."""
    folder.mkdir(parents=True)
    summary = {f"{key}_{when}_{cache}": value
               for when, cache, x in (("before", "dense", [0, 0, 0, 1]), ("after", "dense", scores),
                                      ("before", "evicted", [0, 0, 0, 0]),
                                      ("after", "evicted", [0, *scores[1:]]))
               for key, value in (("accuracy", sum(x) / len(x)), ("scores", x))}
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
    assert row["dense after"] == "0.583 ±0.717"
    # evicted: naive .5 .25 0, smd .5 .5 0
    assert naive[6] == "0.250 ±0.621" and row["evicted after"] == "0.333 ±0.717"
    assert (row["dense before"], row["evicted before"]) == ("0.250 ±0.000", "0.000 ±0.000")
    # pairs by seed: +.25 +.5 0, evicted 0 +.25 0
    assert row["dense, less the first"] == "+0.250 ±0.621" and naive[7] == "+0.000 ±0.000"
    assert row["evicted, less the first"] == "+0.083 ±0.359"
    # what was not logged is in no mean
    assert (row["k3"], row["min ratio"], row["rejected"]) == ("0.5", "0.01", "0.25")
    assert row["minutes"] == "1.0" and row["mean abs d logp"] == "-"
    assert commands[0] == ("    python train.py --task gsm8k --method naive --steps 2 --keep 0.3 "
                           "--no-control"), "--lr is the default"


def test_intervals():
    assert compare.mean_and_half([1.0, 3.0]) == (2.0, pytest.approx(12.706 * math.sqrt(2 / 2)))
    mean, half = compare.mean_and_half([1.0])
    assert mean == 1 and math.isnan(half)
    for n, quantile in ((3, 4.303), (5, 2.776), (11, 2.228), (12, 2.2), (13, 2.2)):
        values = [0.0] * (n - 1) + [float(n)]  # mean 1, variance n
        assert compare.mean_and_half(values) == (1, pytest.approx(quantile))


def test_bad_input(runs, tmp_path):
    with pytest.raises(BadInput, match="empty: no run there"):
        compare.read_runs([runs, tmp_path / "empty"])
    write(runs / "again", "smd", 0, [1, 1, 1, 1])
    with pytest.raises(BadInput, match="seeds .* repeat"):
        compare.rows_of(compare.read_runs([runs]))
    (runs / "again" / "summary.json").write_text('{"a"')
    with pytest.raises(BadInput, match="^[^ ]*again/summary.json: cannot be read"):
        compare.read_runs([runs])
    (runs / "again" / "config.json").write_text('{"vocab_size": 3}')
    with pytest.raises(BadInput, match="again: its config.json is not that of a run"):
        compare.read_runs([runs])


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
    (smd,) = cells(*compare.table(compare.rows_of(compare.read_runs([runs]))).splitlines()[3:4])
    assert smd[1:9] == ["0 of 3", "2", *["-"] * 6] and smd[13:] == ["0.32", "-"]
    (runs / "smd-0" / "summary.json").write_text('{"seconds": 30}')  # --limit 0
    (smd,) = cells(*compare.table(compare.rows_of(compare.read_runs([runs]))).splitlines()[3:4])
    assert smd[1:4] == ["1 of 3", "2", "-"] and smd[14] == "0.5"
    for line in ('{"step": 1', "3"):
        (runs / "smd-0" / "metrics.jsonl").write_text(line)
        with pytest.raises(BadInput, match="metrics.jsonl: .*a line was cut"):
            compare.read_runs([runs])


@pytest.mark.parametrize("key, value", [("shots", 4), ("max_prompt", 99), ("data_dir", "x"),
                                        ("task", "tldr")])
def test_other_problems_have_no_paired_difference(runs, key, value):
    for seed in range(3):
        config = runs / f"smd-{seed}" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), key: value}))
    (smd,) = cells(compare.table(compare.rows_of(compare.read_runs([runs]))).splitlines()[3])
    assert smd[7:9] == ["-", "-"] and smd[4] == "0.583 ±0.717"


def test_fewer_problems_have_no_paired_difference(runs):
    for seed in range(3):
        summary = runs / f"smd-{seed}" / "summary.json"
        seen = json.loads(summary.read_text())
        summary.write_text(json.dumps({**seen, "scores_after_dense": [1]}))
    (smd,) = cells(compare.table(compare.rows_of(compare.read_runs([runs]))).splitlines()[3])
    assert smd[7] == "-" and smd[8] == "+0.083 ±0.359"


def test_a_command_that_a_shell_reads():
    config = {"task": "gsm8k", "model": "/my model", "method": "smd", "keep": 0.3, "control": True}
    assert compare.command(config) == (
        "python train.py --task gsm8k --method smd --model '/my model' --keep 0.3 --control")
    config = {"task": "gsm8k", "model": None, "method": "smd", "lam": 0.0, "teacher": None}
    assert compare.command(config) == "python train.py --task gsm8k --method smd --lam 0.0"


@pytest.mark.parametrize("flags", ["--lora-rank 8 --lr 1e-4", "--keep 0.5 --budget 96", "--lam 0",
                                   "--method naive --keep 0.3", "--model x --steps 9", "--limit 9"])
def test_the_command_makes_the_same_run(flags):
    cfg = dataclasses.asdict(parse(["--task", "tldr", *flags.split()], "x"))
    again = compare.command(cfg).removeprefix("python train.py ").split()
    assert {**dataclasses.asdict(parse(again, "x")), "out": 0} == {**cfg, "out": 0}


def test_curves(runs, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = {}
    monkeypatch.setattr(pyplot, "close", lambda figure: drawn.update(
        {figure.axes[0].get_ylabel() or "ends": figure.axes[0]}))
    compare.draw(compare.rows_of(compare.read_runs([runs])), tmp_path / "png")
    naive, smd = drawn["reward/mean"].get_lines()
    assert list(smd.get_xdata()) == [1, 2] and smd.get_label() == "method=smd"
    assert list(smd.get_ydata()) == [1.25, 1.5]  # s / 4 + seed, over seeds 0 to 2
    dots = [list(x.get_xdata()) for x in drawn["ends"].get_lines() if x.get_marker() == "o"]
    assert dots == [[0.5, 0.25, 0.25], [0.5, 0.25, 0.0], [0.75, 0.75, 0.25], [0.5, 0.5, 0.0]]
    assert sorted(p.name for p in (tmp_path / "png").iterdir()) == [
        "ends.png", "mismatch_kl.png", "reward_mean.png"], "what is logged"
    assert (tmp_path / "png" / "reward_mean.png").stat().st_size > 5000
