"""The recipes in runs/: their training commands are valid, finished runs are left."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from config import parse

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(p.name for p in (ROOT / "runs").glob("*.sh")
                 if "common.sh" in p.read_text())
STUB = """#!{python}
import json, os, sys
from pathlib import Path
if sys.argv[1] == "train.py":
    folder = Path(sys.argv[sys.argv.index("--out") + 1])
    folder.mkdir()
    (folder / "config.json").write_text("{{}}")
    (folder / "summary.json").write_text("{{}}")
with open(os.environ["CALLS"], "a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\\n")
"""


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_what_it_says_and_not_twice(recipe, tmp_path):
    (tmp_path / "runs").mkdir()
    for name in (recipe, "common.sh"):
        (tmp_path / "runs" / name).write_bytes((ROOT / "runs" / name).read_bytes())
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    seen = []
    for _ in range(2):
        subprocess.run(["bash", f"runs/{recipe}"], cwd=tmp_path, check=True, capture_output=True,
                       env={**os.environ, "PYTHON": str(stub), "CALLS": str(calls), "JOBS": "2"})
        seen.append([json.loads(x) for x in calls.read_text().splitlines()])
        calls.unlink()
    trained = [x for x in seen[0] if x[0] == "train.py"]
    assert trained and not [x for x in seen[1] if x[0] == "train.py"]
    cells = {}
    for argv in trained:
        cfg = parse(argv[1:], "x")
        folder = Path(cfg.out)
        assert folder.name == str(cfg.seed)
        # What the folder does not say is common to all.
        said = dict(re.findall("(steps|method|lam|lr|teacher|policy|keep)_([^_]+)",
                               folder.parent.name))
        said = {"steps": "40", "teacher": "initial", "lam": "0.1", "policy": "snapkv",
                "lr": "3e-4", **said}
        assert (cfg.prompts, cfg.limit, cfg.steps) == (4, 128, int(said["steps"]))
        assert cfg.lr == float(said["lr"])
        assert (cfg.method, cfg.policy, cfg.keep) == (said["method"], said["policy"],
                                                      float(said["keep"]))
        if cfg.method == "smd":
            assert cfg.lam == float(said["lam"])
            assert cfg.teacher == (said["teacher"] if cfg.lam else None)
        cells.setdefault((cfg.task, folder.parent), set()).add(cfg.seed)
    compared = [x for x in seen[1] if x[0] == "benchmarks/compare.py"]
    assert {str(cell) for _, cell in cells} == {x for argv in compared for x in argv
                                                if x.startswith("out/runs/")}
    for (task, cell), seeds in cells.items():
        many = task in ("gsm8k", "hotpotqa") and not re.search("steps_200|lam_1000", cell.name)
        assert len(seeds) >= (5 if many else 3), cell


@pytest.mark.parametrize("given, runs", [({}, 3 * 4), ({"LORA": "16", "DATA": "."}, 4 * 5)])
def test_the_recipe_of_the_4b(given, runs, tmp_path):
    """The paper's settings where they are known; finished runs are left, cut ones go on."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "paper_4b.sh").write_bytes((ROOT / "runs" / "paper_4b.sh").read_bytes())
    stub, calls = tmp_path / "python", tmp_path / "calls"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)

    def trained() -> list:
        subprocess.run(["bash", "runs/paper_4b.sh"], cwd=tmp_path, check=True, capture_output=True,
                       env={**os.environ, "PYTHON": str(stub), "CALLS": str(calls), **given})
        every = [json.loads(x) for x in calls.read_text().splitlines()]
        calls.unlink()
        tables = [x for x in every if x[0] == "benchmarks/compare.py"]
        assert len(tables) == (4 if "DATA" in given else 3)
        return [parse(x[1:], "x") for x in every if x[0] == "train.py"]

    first = trained()
    assert len({cfg.out for cfg in first}) == runs == len(first) and not trained()
    assert {(c.policy, c.keep, c.lam) for c in first if c.method == "smd"} == {("snapkv", 0.5, 0.1)}
    assert all(c.overwrite and bool(c.lora_rank) == bool(given) for c in first)
    cut = tmp_path / first[0].out
    (cut / "summary.json").unlink()
    (cut / "checkpoint-000020").mkdir()
    stub.write_text(stub.read_text().replace("folder.mkdir()", "folder.mkdir(exist_ok=True)"))
    (again,) = trained()
    assert again.resume and again.out == first[0].out


def test_a_run_that_fails_fails_the_recipe(tmp_path):
    """Its reason is told, and the others are trained."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "common.sh").write_bytes((ROOT / "runs" / "common.sh").read_bytes())
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    recipe = tmp_path / "runs" / "it.sh"
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    recipe.write_text("set -euo pipefail; source runs/common.sh\n"
                      "cell 0 --task gsm8k --keep 2\n"
                      "cell 0 --task gsm8k --steps 0 --limit 0\ntable both\n")
    done = subprocess.run(["bash", str(recipe)], text=True, capture_output=True, cwd=tmp_path,
                          env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"})
    assert done.returncode != 0 and "error: --keep 2" in done.stderr
    assert "## both" in done.stdout and "| gsm8k | 1 | 0 | - " in done.stdout
    runs = tmp_path / "out" / "runs"
    assert [p.parent.parent.name for p in runs.glob("*/*/summary.json")] == [
        "task_gsm8k_steps_0_limit_0"]


def test_a_table_without_runs_fails_the_recipe_and_costs_no_other(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "common.sh").write_bytes((ROOT / "runs" / "common.sh").read_bytes())
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    recipe = tmp_path / "runs" / "it.sh"
    recipe.write_text("set -euo pipefail; source runs/common.sh\ntable one\ntable two\n")
    done = subprocess.run(["bash", str(recipe)], text=True, capture_output=True, cwd=tmp_path,
                          env={**os.environ, "PYTHON": sys.executable})
    assert done.returncode == 1 and "## one" in done.stdout and "## two" in done.stdout


ROW = {"policy": "recent", "keep": 0.5, "prompt_tokens": [5], "tokens": 9, "rejected_frac": 0.25,
       "logp_abs_mean": 0.5, "logp_abs_max": 8, "kl": 0.4, "ratio_p01": 1e-3, "ratio_min": 1e-5,
       "outside_frac": 0.5}
MEASURE = """#!{python}
import json, os, sys
if sys.argv[1] == "-":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
from benchmarks.mismatch import FLAGS, Flags, GRID
from config import parse
cfg = parse(sys.argv[2:], "x", FLAGS, Flags)
with open(os.environ["CALLS"], "a") as f:
    f.write(f"{{cfg.task}} {{cfg.max_new}}\\n")
print("cpu, fp32")
for _ in range(2 * (len(GRID) if cfg.grid else 1)):
    print(json.dumps(dict({row}, task=cfg.task)))
"""


@pytest.mark.parametrize("recipe, calls, rows", [
    ("length.sh", [f"gsm8k {n}" for n in (24, 48, 96, 192)], 4),
    ("mismatch.sh", [f"{t} 48" for t in ("gsm8k", "hotpotqa", "govreport", "tldr")], 48)])
def test_the_recipes_on_a_real_checkpoint(recipe, calls, rows, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / recipe).write_bytes((ROOT / "runs" / recipe).read_bytes())
    stub, log = tmp_path / "python", tmp_path / "calls"
    stub.write_text(MEASURE.format(python=sys.executable, row=ROW))
    stub.chmod(0o755)
    env = {**os.environ, "PYTHON": str(stub), "CALLS": str(log), "PYTHONPATH": str(ROOT),
           "MODEL": str(tmp_path), "DATA": str(tmp_path)}
    for _ in range(2):  # the second time nothing is left to measure
        done = subprocess.run(["bash", f"runs/{recipe}"], cwd=tmp_path, check=True, env=env,
                              capture_output=True, text=True)
        assert log.read_text().splitlines() == calls
        head, line, *table = done.stdout.splitlines()
        assert {x.count("|") for x in (head, line, *table)} == {head.count("|")}
        assert len(table) == rows and all("| 0.50 | 8.0 | 0.4 | 1.0e-03 |" in x for x in table)
