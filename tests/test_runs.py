"""The recipes in runs/: their training commands are valid, finished runs are left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config import parse

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(p.name for p in (ROOT / "runs").glob("*.sh")
                 if "runs/each.sh" in p.read_text() and p.name != "each.sh")
STUB = """#!{python}
import json, os, sys
from pathlib import Path
if sys.argv[1] == "train.py":
    folder = Path(sys.argv[sys.argv.index("--out") + 1])
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{{}}")
with open(os.environ["CALLS"], "a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\\n")
"""


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_what_it_says_and_not_twice(recipe, tmp_path):
    (tmp_path / "runs").mkdir()
    for name in (recipe, "each.sh"):
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
        assert cfg.out.endswith(f"-{cfg.seed}")
        cells.setdefault((cfg.task, cfg.out.rpartition("-")[0]), set()).add(cfg.seed)
    for (task, cell), seeds in cells.items():
        assert len(seeds) >= (5 if task in ("gsm8k", "hotpotqa") else 3), cell


def test_a_run_that_fails_fails_the_recipe(tmp_path):
    """Its reason is told, and the others are trained."""
    done = subprocess.run(
        ["bash", str(ROOT / "runs" / "each.sh")], text=True, capture_output=True,
        input=f"{tmp_path}/bad-0 --task gsm8k --keep 2\n{tmp_path}/good-0 --task gsm8k --steps 0 "
              "--limit 0\n",
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"})
    assert done.returncode != 0 and "error: --keep 2" in done.stderr
    assert (tmp_path / "good-0" / "summary.json").is_file()
    assert not (tmp_path / "bad-0" / "summary.json").exists()
