"""Compare runs: a table with intervals over seeds, paired differences, and curves.

    python benchmarks/compare.py out/run1 out/run2 ...              # or a folder of runs
    python benchmarks/compare.py out/methods --png out/methods      # and curves, with matplotlib

Runs that differ in the seed alone form a row, named by the flags that differ. Intervals are
95 %, Student's t over seeds. A paired difference is to the first row: the same seeds on the same
problems.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from errors import BadInput, read_json, run_cli  # noqa: E402

IGNORED = {"seed", "out", "resume", "overwrite", "commit", "torch", "device", "save_every"}
# 97.5 % quantiles of Student's t with 1 .. 9 degrees of freedom; beyond, the normal one and a bit.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
CURVES = ("reward/mean", "eval/dense", "eval/evicted", "mismatch/kl")


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """Mean and half the 95 % interval; the half is NaN for a single value."""
    n, mean = len(values), sum(values) / len(values)
    if n == 1:
        return mean, math.nan
    deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
    return mean, (STUDENT[n - 2] if n <= 10 else 2.2) * deviation / math.sqrt(n)


def read_runs(places: list[Path]) -> list[dict]:
    """Config, summary and log of each run at, or directly below, the places."""
    folders = [f for p in places for f in ([p] if (p / "config.json").is_file()
                                           else sorted(p.glob("*/")))
               if (f / "summary.json").is_file()]
    if not folders:
        raise BadInput(f"{', '.join(map(str, places))}: no finished run (config.json and "
                       "summary.json); name folders that train.py wrote")
    return [{"folder": f, "config": read_json(f / "config.json"),
             "summary": read_json(f / "summary.json"),
             "log": [json.loads(x) for x in (f / "metrics.jsonl").read_text().splitlines()]}
            for f in folders]


def rows_of(runs: list[dict]) -> dict[str, list[dict]]:
    """Runs by what they have in common, but for the seed."""
    keys = {key for run in runs for key in run["config"]} - IGNORED
    varied = sorted(key for key in keys if len({str(r["config"].get(key)) for r in runs}) > 1)
    rows = defaultdict(list)
    for run in runs:
        name = " ".join(f"{key}={run['config'].get(key)}" for key in varied)
        rows[name or run["config"]["task"]].append(run)
    for name, row in rows.items():
        seeds = [run["config"]["seed"] for run in row]
        if len(set(seeds)) < len(seeds):
            raise BadInput(f"{name}: seeds {sorted(seeds)} repeat; remove one of the runs")
    return rows


def difference(row: list[dict], first: list[dict], cache: str) -> str:
    """Mean over seeds of the mean over problems of (row - first), seeds in common."""
    other, found = {run["config"]["seed"]: run for run in first}, []
    for run in row:
        if pair := other.get(run["config"]["seed"]):
            a, b = (x["summary"].get(f"scores_after_{cache}", []) for x in (run, pair))
            if len(a) == len(b) > 0:
                found.append(sum(x - y for x, y in zip(a, b, strict=True)) / len(a))
    return "{:+.3f} +-{:.3f}".format(*mean_and_half(found)) if found else "-"


def table(rows: dict[str, list[dict]]) -> str:
    names, first = list(rows), next(iter(rows.values()))
    width = max(map(len, names)) + 2
    out = [f"{'':{width}}seeds   dense after      evicted after    less the first: dense, evicted"
           "   max |d logp|  rejected"]
    for name, row in rows.items():
        task_metric = next(k.removesuffix("_after_dense") for k in row[0]["summary"]
                           if k.endswith("_after_dense"))
        after = ["{:.3f} +-{:.3f}".format(*mean_and_half(
            [run["summary"][f"{task_metric}_after_{cache}"] for run in row]))
            for cache in ("dense", "evicted")]
        apart = [difference(row, first, cache) for cache in ("dense", "evicted")]
        worst = max(run["summary"]["mismatch_logp_abs_max"] for run in row)
        rejected = [x.get("mismatch/rejected_frac", 0.0) for run in row for x in run["log"]]
        out.append(f"{name:{width}}{len(row):5}   {after[0]:17}{after[1]:17}{apart[0]:16}"
                   f"{apart[1]:16}{worst:12.2g}{sum(rejected) / max(1, len(rejected)):10.4f}")
    return "\n".join(out)


def draw(rows: dict[str, list[dict]], png: Path) -> None:
    """One figure a curve: the mean over seeds, and the range, of each row."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise BadInput("--png: matplotlib is not installed; pip install matplotlib") from None
    png.mkdir(parents=True, exist_ok=True)
    for curve in CURVES:
        if not any(curve in x for row in rows.values() for run in row for x in run["log"]):
            continue
        figure, axes = pyplot.subplots(figsize=(6, 4))
        for name, row in rows.items():
            points = defaultdict(list)
            for run in row:
                for x in run["log"]:
                    if curve in x:
                        points[x["step"]].append(x[curve])
            if points:
                steps = sorted(points)
                axes.plot(steps, [sum(points[s]) / len(points[s]) for s in steps], label=name)
                axes.fill_between(steps, [min(points[s]) for s in steps],
                                  [max(points[s]) for s in steps], alpha=0.15)
        axes.set(xlabel="step", ylabel=curve)
        axes.legend(fontsize="small")
        figure.savefig(png / f"{curve.replace('/', '_')}.png", dpi=150, bbox_inches="tight")
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or folders of these")
    parser.add_argument("--png", type=Path, help="folder to draw curves into")
    args = parser.parse_args()
    rows = rows_of(read_runs(args.runs))
    print(table(rows))
    if args.png:
        draw(rows, args.png)


if __name__ == "__main__":
    run_cli(main)
