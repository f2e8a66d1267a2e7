"""benchmarks/show.py: what it prints is what the record says."""

import re

import pytest
import torch

from benchmarks import show
from errors import run_cli
from eval import load
from eviction import NEVER

PROMPT = "Tom has 3 apples and buys 4. How many apples does Tom have?"


def run(capsys, monkeypatch, *argv):
    """Lines printed, and the record and tokens of the rollout behind them."""
    made, once = [], show.generate

    def generate(*args, **options):
        made.append(once(*args, **options))
        return made[-1]

    monkeypatch.setattr(show, "generate", generate)
    monkeypatch.setattr("sys.argv", ["show.py", *argv])
    show.main()
    return capsys.readouterr().out.splitlines(), made[0]


@pytest.mark.parametrize("argv", [
    ["--policy", "h2o", "--keep", "0.5"],
    ["--window", "4", "--budget", "16", "--evict-every", "4", "--prefill-chunk", "8"],
])
def test_every_column_is_the_share_of_the_record(argv, capsys, monkeypatch):
    lines, rollout = run(capsys, monkeypatch, "--prompt", PROMPT, "--max-new", "20", *argv)
    P, R = len(rollout.prompts[0]), int(rollout.lengths[0, 0])
    record = rollout.evict_at[0][:, 0, :, : P + R]  # (L, Hkv, T)
    rows = [re.match(r" *(\d+)  (\S+)  \"", line) for line in lines[1 : P + R + 1]]
    assert [int(row[1]) for row in rows] == list(range(P + R))
    seen = set()
    for t, row in enumerate(rows[:-1]):
        heads = (record[:, :, t] == NEVER).sum(1).tolist()  # of 2
        assert row[2] == "".join(".5#"[n] for n in heads)
        seen |= set(row[2])
    assert seen == set(".5#") and rows[-1][2] == "-" * len(record)
    left = (record[..., : P + R - 1] == NEVER).sum() / record[..., 0].numel()
    assert f"{P} prompt and {R} response tokens; {left:.1f} keys left a head" in lines[-1]
    assert f"{rollout.kv_bytes_peak:,} bytes" in lines[-1]


def test_columns():
    assert [show.column(x) for x in (0, 1e-3, 0.04, 0.25, 0.5, 0.99, 1)] == list(".11259#")


def test_tokens_spell_the_conversation(capsys, monkeypatch):
    lines, rollout = run(capsys, monkeypatch, "--prompt", PROMPT, "--max-new", "5")
    from config import parse

    tok, _ = load(parse(["--task", "gsm8k"], "x"))
    text = "".join(re.findall(r'  "(.*)"$', "\n".join(lines), re.MULTILINE))
    assert text.startswith("<|im_start|>user\\n" + PROMPT + "<|im_end|>")
    ids = torch.cat((rollout.prompts[0], rollout.tokens[0, 0, :5])).tolist()
    assert len(ids) == len(tok.chat(PROMPT)) + 5
    assert "nothing was evicted: 36 keys" in lines[-1]


@pytest.mark.parametrize("argv,says", [([], "--prompt: expected the text"),
                                       (["--prompt", "x", "--policy", "h20"], "h2o")])
def test_bad_input(argv, says, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["show.py", *argv])
    with pytest.raises(SystemExit) as e:
        run_cli(show.main)
    line = capsys.readouterr().err.strip()
    assert e.value.code == 2 and line.startswith("error: ") and says in line and "\n" not in line

