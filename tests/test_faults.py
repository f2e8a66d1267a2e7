"""Faults that were found by trying to break the programs, each kept as a test."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from config import parse
from data import gsm8k, stories
from errors import BadInput, run_cli
from eval import load, load_problems
from eviction import Eviction
from model import load_model
from rollout import generate

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--task", "gsm8k", "--limit", "0", "--eval-every", "0", "--prompts", "1", "--group", "2",
         "--max-new", "4", "--no-control", "--out", "run"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for split in ("train", "test"):
        write_rows(folder / f"{split}.jsonl", ["3"] * 3)
    return folder


def write_rows(path, answers, question="Tom has 3 pens."):
    path.write_text("".join(json.dumps({"question": question, "answer": f"x\n#### {a}"}) + "\n"
                            for a in answers))


def go(*argv):
    train.run(parse([*SMALL, *map(str, argv)], train.__doc__))


def refused(capsys, *argv):
    """The last line on stderr of a run that must end with status 2."""
    with pytest.raises(SystemExit) as e:
        run_cli(lambda: go(*argv))
    assert e.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def test_weights_that_blow_up_never_replace_a_good_checkpoint(rows, capsys, monkeypatch):
    """Not only a NaN loss: the weights themselves are bad from step 3 on."""
    once = train.train_step

    def blow(model, *rest):
        out = once(model, *rest)
        if rest[4] == 2:  # the update of step 3
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(torch.nan)
        return out

    monkeypatch.setattr(train, "train_step", blow)
    line = refused(capsys, "--data-dir", rows, "--steps", 20, "--save-every", 2)
    assert "NaN" in line and "--lr" in line
    kept = list(Path("run").glob("checkpoint-*"))
    assert [p.name for p in kept] == ["checkpoint-000002"]
    good = load_model(kept[0], dtype=torch.float32)
    assert all(p.isfinite().all() for p in good.parameters())


def test_a_tiny_temperature_is_one_line(rows, capsys):
    line = refused(capsys, "--data-dir", rows, "--steps", 1, "--temperature", "1e-40")
    assert "--temperature" in line


def test_what_the_user_keeps_beside_the_checkpoints_stays(rows):
    go("--data-dir", rows, "--steps", 1)
    shutil.copytree("run/checkpoint-000001", "run/checkpoint-best")
    go("--data-dir", rows, "--steps", 2, "--resume")
    assert sorted(p.name for p in Path("run").glob("checkpoint*")) == [
        "checkpoint-000002", "checkpoint-best"]


def test_a_lone_surrogate_in_a_question_is_logged(tmp_path):
    for split in ("train", "test"):
        write_rows(tmp_path / f"{split}.jsonl", ["3"], question="Tom \ud800 has\u2028 3")
    go("--data-dir", tmp_path, "--steps", 1)
    go("--data-dir", tmp_path, "--steps", 2, "--resume")
    lines = Path("run/samples.jsonl").read_text().splitlines()
    assert len(lines) == 4 and "\ud800" in json.loads(lines[0])["prompt"]


@pytest.mark.parametrize("answer", ["inf", "nan", "١٨", "1_000", "1e400", "1,2,3", "3/0", "five"])
def test_reference_answers_that_scoring_would_read_otherwise(tmp_path, answer):
    write_rows(tmp_path / "test.jsonl", ["18", answer])
    with pytest.raises(BadInput, match=r"test\.jsonl:2: "):
        gsm8k.load("test", str(tmp_path))


@pytest.mark.parametrize("answer", ["18", "-5", "1,080", "0.5", " 7 "])
def test_reference_answers_that_are_fine(tmp_path, answer):
    write_rows(tmp_path / "test.jsonl", [answer])
    (problem,) = gsm8k.load("test", str(tmp_path))
    assert gsm8k.reward(f"so \\boxed{{{answer}}}", problem) == 1.0


def test_the_first_line_names_the_stories_only_where_they_are(rows, capsys):
    go("--data-dir", rows, "--steps", 0)
    assert "generated gsm8k problems" not in capsys.readouterr().out
    go("--steps", 0, "--out", "other")
    assert "generated gsm8k problems" in capsys.readouterr().out.splitlines()[0]


def test_a_trained_checkpoint_can_be_evaluated_on_the_stories():
    flags = ["--task", "gsm8k", "--model", str(stories.MODEL), "--data-dir", "stories"]
    cfg = parse(flags, "")
    tok, _ = load(cfg)
    assert [p for p, _ in load_problems(cfg, "test", tok)] == stories.load("test")


def test_a_large_seed_of_the_random_policy():
    cfg = parse(["--task", "gsm8k"], "")
    tok, model = load(cfg)
    for seed in (10**10, 2**62):
        rollout = generate(model, [list(range(60))], sequence=[0], G=2, max_new=2,
                           stop_ids=tok.stop_ids, seed=seed,
                           eviction=Eviction("random", 0.5, sinks=2, window=4, seed=seed))
        assert rollout.kv_bytes_peak < rollout.kv_bytes_dense


def test_more_prompts_than_problems_are_refused(rows, capsys):
    assert "--prompts 5" in refused(capsys, "--data-dir", rows, "--steps", 1, "--prompts", 5)
    assert not Path("run").exists()


def test_tokenizer_files_of_another_model_are_refused(tmp_path, capsys):
    folder = shutil.copytree(stories.MODEL, tmp_path / "mixed")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"]["5000"] = {"content": "<extra>"}
    path.write_text(json.dumps(config))
    line = refused(capsys, "--model", folder, "--data-dir", "stories", "--steps", 1)
    assert "5001" in line and "1040" in line and not Path("run").exists()


@pytest.mark.parametrize("key,value", [("hidden_size", "256"), ("num_key_value_heads", 0),
                                       ("rms_norm_eps", None)])
def test_sizes_that_are_no_sizes(tmp_path, capsys, key, value):
    folder = shutil.copytree(stories.MODEL, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    assert key in refused(capsys, "--model", folder, "--data-dir", "stories", "--steps", 1)


def test_a_damaged_run_config(rows, capsys):
    go("--data-dir", rows, "--steps", 1)
    Path("run/config.json").write_text("[]")
    line = refused(capsys, "--data-dir", rows, "--steps", 2, "--resume")
    assert "run/config.json" in line


@pytest.mark.parametrize("argv", [["--keep", "abc"], ["--no-such-flag"], ["--policy", "x"]])
def test_bad_flags_are_one_line(argv, capsys):
    with pytest.raises(SystemExit) as e:
        run_cli(lambda: parse(["--task", "gsm8k", *argv], ""))
    error = capsys.readouterr().err.splitlines()
    assert e.value.code == 2 and len(error) == 1 and argv[0] in error[0]


@pytest.mark.parametrize("megabytes", [0, 8])
def test_a_full_disk_is_one_line(rows, megabytes):
    """A limit on the size of files stands for the disk: of a log, and of a weights file."""
    command = [sys.executable, str(ROOT / "train.py"), *SMALL, "--data-dir", str(rows), "--steps",
               "1"]
    shell = f"ulimit -f {max(1, megabytes * 1000)}; exec \"$@\""
    done = subprocess.run(["bash", "-c", shell, "_", *command], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr
    assert not list(Path("run").glob("checkpoint-*"))


def test_an_interrupt_is_no_traceback(rows):
    run = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *SMALL, "--data-dir", str(rows),
                            "--steps", "100000"], stderr=subprocess.PIPE, text=True,
                           stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
                           # A shell's background jobs ignore the signal, and so would this.
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    log = Path("run/metrics.jsonl")
    for _ in range(600):
        if log.exists() and log.read_text().count("\n") > 2:
            break
        time.sleep(0.1)
    run.send_signal(signal.SIGINT)
    error = run.communicate(timeout=60)[1]
    assert run.returncode == 130 and "Traceback" not in error


@pytest.mark.parametrize("page", ["README.md", "results/embedded.md", "results/mismatch.md",
                                  "results/mismatch_real.md", "results/methods.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    links = [x for x in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in x]
    assert all((ROOT / page).parent.joinpath(x).exists() for x in links), links
    assert links or page != "README.md"


def test_lengths_that_the_readme_states():
    cfg = parse(["--task", "gsm8k"], "")
    tok, _ = load(cfg)
    lengths = [len(ids) for split in ("train", "test") for _, ids in load_problems(cfg, split, tok)]
    assert f"{min(lengths)} to {max(lengths)} tokens" in (ROOT / "README.md").read_text()
