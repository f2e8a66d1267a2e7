"""Compare runs: a table with intervals over seeds, paired differences, and curves.

    python benchmarks/compare.py out/run1 out/run2 ...              # or a folder of runs
    python benchmarks/compare.py out/methods --png out/methods      # and curves, with matplotlib

Runs that differ in the seed alone form a row, named by the flags that differ. Intervals are
95 %, Student's t over seeds. A paired difference is to the first row: the same seeds on the same
problems. Mismatch columns are means over the logged steps, `min ratio` is the least of all. Seeds
`4 of 5`: one run did not finish, and is in the mismatch columns alone. The table is Markdown, and
ends with the command of each row. A curve holds the steps that all runs of the row have a value of.
"""

import argparse
import dataclasses
import json
import math
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import parse  # noqa: E402
from errors import BadInput, read_json, run_cli  # noqa: E402

IGNORED = {"seed", "out", "resume", "overwrite", "commit", "torch", "device", "save_every"}
# 97.5 % quantiles of Student's t with 1 .. 10 degrees of freedom; 2.2 beyond is near enough.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262,
           2.228)
PROBLEMS = ("task", "data_dir", "shots", "max_prompt")  # say which ones are tested
CURVES = ("reward/mean", "eval/dense", "eval/evicted", "mismatch/kl", "distill/kl",
          "policy/entropy")
HEAD = ("runs", "seeds", "steps", "dense before", "dense after", "evicted before", "evicted after",
        "dense, less the first", "evicted, less the first", "mean abs d logp", "k3", "1 % ratio",
        "min ratio", "rejected", "minutes")


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """Mean and half the 95 % interval; the half is NaN for a single value."""
    n, mean = len(values), sum(values) / len(values)
    if n == 1:
        return mean, math.nan
    deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
    return mean, (STUDENT[n - 2] if n <= 11 else 2.2) * deviation / math.sqrt(n)


def spread(values: Iterable[float], sign: str = "") -> str:
    mean, half = mean_and_half(list(values))
    return f"{mean:{sign}.3f}" + ("" if math.isnan(half) else f" ±{half:.3f}")


def read_runs(places: list[Path]) -> list[dict]:
    """Config, summary and log of each run at, or directly below, the places. A run that did not
    finish has an empty summary."""
    runs = []
    for place in places:
        folders = [place] if (place / "config.json").is_file() else sorted(
            f for f in place.glob("*/") if (f / "config.json").is_file())
        if not folders:
            raise BadInput(f"{place}: no run there; name folders that train.py wrote")
        for f in folders:
            log, summary = f / "metrics.jsonl", f / "summary.json"
            config = read_json(f / "config.json")
            if not {"seed", "task", "steps"} <= config.keys():
                raise BadInput(f"{f}: its config.json is not that of a run; name folders that "
                               "train.py wrote")
            try:
                rows = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
                rows = [dict(json.loads(x)) for x in rows]
            except (TypeError, ValueError) as e:
                raise BadInput(f"{log}: {e}; a line was cut; leave the run out") from e
            runs.append({"folder": f, "config": config, "log": rows,
                         "summary": read_json(summary) if summary.is_file() else {}})
    return runs


def rows_of(runs: list[dict]) -> dict[str, list[dict]]:
    """Runs by what they have in common, but for the seed."""
    keys = {key for run in runs for key in run["config"]} - IGNORED
    varied = [key for key in sorted(keys, key=lambda key: (key != "method", key))
              if len({str(run["config"].get(key)) for run in runs}) > 1]
    rows = defaultdict(list)
    for run in runs:
        name = " ".join(f"{key}={run['config'][key]}" for key in varied
                        if run["config"].get(key) is not None)
        rows[name or run["config"]["task"]].append(run)
    for name, row in rows.items():
        seeds = [run["config"]["seed"] for run in row]
        if len(set(seeds)) < len(seeds):
            raise BadInput(f"{name}: seeds {sorted(seeds)} repeat; remove one of the runs")
    return rows


def difference(row: list[dict], first: list[dict], cache: str) -> str:
    """Mean over seeds of the mean over problems of (row - first), seeds in common; the same
    problems, or nothing."""
    other, found = {run["config"]["seed"]: run for run in first}, []
    for run in row:
        pair = other.get(run["config"]["seed"])
        if pair and all(pair["config"].get(key) == run["config"].get(key) for key in PROBLEMS):
            a, b = (x["summary"].get(f"scores_after_{cache}", []) for x in (run, pair))
            if len(a) == len(b) > 0:
                found.append(sum(x - y for x, y in zip(a, b, strict=True)) / len(a))
    return spread(found, "+") if found else "-"


def command(config: dict) -> str:
    """The command line that makes a run, but for its seed and folder."""
    out = ["--task", config["task"], "--method", config.get("method", "smd")]
    for key in ("model", "lora_rank", "budget"):  # others' defaults depend on these
        out += [f"--{key.replace('_', '-')}", str(config[key])] if config.get(key) else []
    usual = dataclasses.asdict(parse(out, ""))
    for key, value in config.items():
        if key in IGNORED or value is None or usual.get(key, value) == value:
            continue
        flag = "--" + key.replace("_", "-")
        out += ([flag, str(value)] if not isinstance(value, bool) else
                [flag if value else flag.replace("--", "--no-")])
    return f"python train.py {shlex.join(out)}"


def table(rows: dict[str, list[dict]]) -> str:
    first = next(iter(rows.values()))
    out = [" | ".join(HEAD), "|".join(["---"] * len(HEAD))]
    for name, every in rows.items():
        row = [run for run in every if run["summary"]]  # a run that broke off has no end
        metric, ends = metric_of(row), ["-"] * 4
        if metric:
            ends = [spread(run["summary"][f"{metric}_{when}_{cache}"] for run in row)
                    for cache in ("dense", "evicted") for when in ("before", "after")]
        seconds = [run["summary"]["seconds"] for run in row if "seconds" in run["summary"]]
        logged = {key: [x[f"mismatch/{key}"] for run in every for x in run["log"]
                        if x.get(f"mismatch/{key}") is not None]
                  for key in ("logp_abs_mean", "kl", "ratio_p01", "ratio_min", "rejected_frac")}
        means = [f"{sum(x) / len(x):.2g}" if x else "-" for x in logged.values()]
        least = f"{min(logged['ratio_min']):.1g}" if logged["ratio_min"] else "-"
        out.append(" | ".join((
            name, f"{len(row)}" + (f" of {len(every)}" if len(every) > len(row) else ""),
            str(every[0]["config"]["steps"]), *ends,
            difference(row, first, "dense"), difference(row, first, "evicted"), *means[:3],
            least, means[4],
            f"{sum(seconds) / len(seconds) / 60:.1f}" if seconds else "-")))
    lines = [f"| {x} |" for x in out]
    return "\n".join([*lines, "", *(f"    {command(row[0]['config'])}" for row in rows.values())])


def metric_of(row: list[dict]) -> str | None:
    """The task's main metric, of the runs that finished."""
    return next((key.removesuffix("_after_dense") for run in row for key in run["summary"]
                 if key.endswith("_after_dense")), None)


def draw(rows: dict[str, list[dict]], png: Path) -> None:
    """One figure a curve: of each row the mean over seeds and its 95 % interval. `ends.png`: where
    the runs ended, a dot a seed, with the same interval."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise BadInput("--png: matplotlib is not installed; pip install matplotlib") from None
    png.mkdir(parents=True, exist_ok=True)
    for curve in CURVES:
        if not any(x.get(curve) is not None
                   for row in rows.values() for run in row for x in run["log"]):
            continue
        figure, axes = pyplot.subplots(figsize=(6, 4))
        for name, row in rows.items():
            points = defaultdict(list)
            for run in row:
                for x in run["log"]:
                    if x.get(curve) is not None:
                        points[x["step"]].append(x[curve])
            steps = sorted(s for s in points if len(points[s]) == max(map(len, points.values())))
            if not steps:
                continue
            mean, half = zip(*(mean_and_half(points[s]) for s in steps), strict=True)
            axes.plot(steps, mean, label=name)
            axes.fill_between(steps, [m - h for m, h in zip(mean, half, strict=True)],
                              [m + h for m, h in zip(mean, half, strict=True)], alpha=0.15)
        axes.set(xlabel="step", ylabel=curve)
        axes.legend(fontsize="small")
        figure.savefig(png / f"{curve.replace('/', '_')}.png", dpi=150, bbox_inches="tight")
        pyplot.close(figure)
    ended = {name: [run["summary"] for run in row if metric_of([run])]
             for name, row in rows.items()}
    ended = {name: row for name, row in ended.items() if row}
    if not ended:
        return
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.5 * len(ended)))
    metrics = [metric_of(rows[name]) for name in ended]
    for y, (metric, row) in enumerate(zip(metrics, ended.values(), strict=True)):
        for cache, colour, shift in (("dense", "tab:blue", -0.12), ("evicted", "tab:orange", 0.12)):
            values = [x[f"{metric}_after_{cache}"] for x in row]
            mean, half = mean_and_half(values)
            axes.plot(values, [y + shift] * len(values), "o", color=colour, alpha=0.35)
            axes.errorbar(mean, y + shift, xerr=half, fmt="|", color=colour, capsize=3,
                          label=f"{cache} cache" if y == 0 else None)
    axes.set(xlabel=f"{', '.join(dict.fromkeys(metrics))} after training",
             yticks=range(len(ended)), yticklabels=ended)
    axes.invert_yaxis()
    axes.legend(fontsize="small")
    figure.savefig(png / "ends.png", dpi=150, bbox_inches="tight")
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
