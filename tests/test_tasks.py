"""The reading tasks: scores, rows, prompts, and documents that are cut to fit."""

import hashlib
import json
import math
import os
import random
import re
import time
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

import train
from config import parse
from data import TASKS, texts
from data.files import Problem
from data.scores import exact_match, f1, longest_common_subsequence, normalise, rouge_l
from errors import BadInput
from eval import load, load_problems, worth

WORDS = "a the cat sat on mat, Dog's 3.5 IT-is É ß x_y\nno yes".split(" ")


def phrase(r: random.Random) -> str:
    return " ".join(r.choice(WORDS) for _ in range(r.randint(0, 12)))


def test_rouge_l_is_that_of_rouge_score():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    r, found = random.Random(0), set()
    for _ in range(500):
        a, b = phrase(r), phrase(r)
        want = scorer.score(b, a)["rougeL"].fmeasure
        assert abs(rouge_l(a, b) - want) < 1e-12, (a, b)
        found.add(round(want, 3))
    assert len(found) > 50 and rouge_l("", "x") == rouge_l("!", "x") == 0.0


def test_longest_common_subsequence_is_the_table():
    r = random.Random(1)
    for _ in range(200):
        a, b = ([r.choice("abcd") for _ in range(r.randint(0, 9))] for _ in range(2))
        table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                table[i + 1][j + 1] = (table[i][j] + 1 if x == y
                                       else max(table[i][j + 1], table[i + 1][j]))
        assert longest_common_subsequence(a, b) == table[-1][-1]


def test_rouge_l_of_two_long_texts_is_fast():
    r = random.Random(2)
    a, b = (" ".join(f"w{r.randrange(300)}" for _ in range(600)) for _ in range(2))
    start = time.perf_counter()
    for _ in range(20):
        rouge_l(a, b)
    assert (time.perf_counter() - start) / 20 < 0.01  # 0.6 ms when idle


def slow_f1(prediction: str, truth: str) -> float:
    """The rules of the official evaluation, word by word."""
    prediction, truth = normalise(prediction), normalise(truth)
    special = ("yes", "no", "noanswer")
    if (prediction in special or truth in special) and prediction != truth:
        return 0.0
    left, same = truth.split(), 0
    for word in prediction.split():
        if word in left:
            left.remove(word)
            same += 1
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction.split()), same / len(truth.split())
    return 2 * precision * recall / (precision + recall)


def test_f1_and_exact_match_follow_the_official_rules():
    r, found = random.Random(3), set()
    for _ in range(500):
        a, b = phrase(r), phrase(r)
        assert abs(f1(a, b) - slow_f1(a, b)) < 1e-12, (a, b)
        found.add(round(f1(a, b), 3))
    assert len(found) > 20
    assert normalise("The  Cat, a Dog's (An) mat!") == "cat dogs mat"
    assert exact_match("The Ring", '"the ring"') == 1 and exact_match("ring", "rings") == 0
    assert f1("yes", "yes it is") == 0 and f1("yes", "Yes.") == 1 and f1("no", "yes") == 0


def test_hotpotqa_answers():
    p = Problem(0, "", "Delta Blues")
    reward = TASKS["hotpotqa"].reward
    assert reward("So. Answer: the Delta Blues", p) == 1
    assert reward("Answer: jazz\nno, Answer: Delta Blues\nmore words", p) == 1
    assert reward("Delta Blues", p) == 1 and reward("", p) == 0
    assert reward("It is the Delta Blues", p) == pytest.approx(2 * 2 / 6)
    metrics = TASKS["hotpotqa"].METRICS
    assert {name: metric("Answer: delta", p) for name, metric in metrics.items()} == {
        "f1": pytest.approx(2 / 3), "em": 0.0}
    assert next(iter(metrics)) == "f1" and reward("Answer:\nDelta Blues\nmore", p) == 1
    assert reward("noanswer is no answer", Problem(0, "", "noanswer")) == 0
    files = TASKS["hotpotqa"].FILES
    assert "train" in files["train"][0] and "dev_distractor" in files["test"][0]


def test_tldr_reward_is_less_for_what_is_longer():
    p, reward = Problem(0, "", "one two three four"), TASKS["tldr"].reward
    assert reward("one two three four", p) == 1 and reward("one two", p) == pytest.approx(2 / 3)
    assert reward("one two three four a b", p) == pytest.approx(0.8 - 0.2 * 0.5)
    assert reward("one " * 40, p) == pytest.approx(2 / 44 - 0.2)
    assert TASKS["tldr"].METRICS["rouge_l"]("one two three four a b", p) == pytest.approx(0.8)


PROMPTS = {
    "hotpotqa": "T: A b. C.\nU: \n\nQuestion: Who?",
    "tldr": "SUBREDDIT: r/s\n\nTITLE: t\n\nPOST: p q\n\nTL;DR:",
    "govreport": "long text\n\nSummary:",
}
ROWS = {
    "hotpotqa": {"question": "Who?", "answer": "X", "context": [["T", ["A b.", " C."]], ["U", []]]},
    "tldr": {"subreddit": "s", "title": "t", "post": "p q", "summary": "q"},
    "govreport": {"report": "long text", "summary": "text"},
}


@pytest.mark.parametrize("task", ROWS)
def test_rows_of_a_folder(task, tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps(ROWS[task]) + "\n" + json.dumps(ROWS[task]) + "\n")
    problems = TASKS[task].load("test", str(tmp_path))
    assert [p.index for p in problems] == [0, 1]
    assert problems[0].prompt == problems[0].before + problems[0].document + problems[0].after
    assert problems[0].prompt.endswith(PROMPTS[task])
    assert TASKS[task].reward(problems[0].answer, problems[0]) == 1
    if task == "hotpotqa":
        assert problems[0].document == "T: A b. C.\nU: "
        path.write_text(json.dumps([ROWS[task]]))  # the official file is one array
        assert TASKS[task].load("test", str(tmp_path)) == problems[:1]
        dicts = dict(ROWS[task], context=[{"title": "T", "text": "A b. C."}])
        path.write_text(json.dumps(dicts))
        assert TASKS[task].load("test", str(tmp_path))[0].document == "T: A b. C."
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps([ROWS[task]]).encode())
    assert TASKS[task].load("test", str(tmp_path)) == problems[:1]
    for text, complaint in (("[" * 100_000, "test.jsonl: "), ("[]", "test.jsonl:1: "),
                            ('{"a": ' * 100_000, "test.jsonl:1: ")):
        path.write_text(text)
        with pytest.raises(BadInput, match=complaint):
            TASKS[task].load("test", str(tmp_path))
    path.write_text(json.dumps(ROWS[task]) + "\n" + json.dumps({"x": 1}))
    with pytest.raises(BadInput, match=r"test\.jsonl:2: .*expected an object with"):
        TASKS[task].load("test", str(tmp_path))
    with pytest.raises(BadInput, match=r"nowhere.*--data-dir FOLDER"):
        TASKS[task].load("test", str(tmp_path / "nowhere"))


@pytest.mark.parametrize("task", ROWS)
def test_generated_problems(task):
    problems = [texts.problem(task, "test", i) for i in range(40)]
    assert problems[7] == texts.problem(task, "test", 7) != texts.problem(task, "train", 7)
    assert len({p.prompt for p in problems}) == 40
    for p in problems:
        assert TASKS[task].reward(p.answer, p) == 1
        if task == "hotpotqa":
            assert p.answer in ("yes", "no") or p.answer in p.document
    p = texts.problem(task, "test", 0)
    *_, answer, other = getattr(texts, task)(random.Random(f"{task} test 0"))
    assert TASKS[task].reward(answer, p) > TASKS[task].reward(other, p) + 0.15


def test_a_long_document_is_cut_and_nothing_else(tmp_path, capsys):
    long = " ".join(f"Sentence {i} of the report." for i in range(300))
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"report": long, "summary": "é"}) + "\n"
                                                 + json.dumps(ROWS["govreport"]))
    argv = ["--task", "govreport", "--data-dir", str(tmp_path), "--limit", "2", "--max-prompt"]
    cfg = parse([*argv, "200"], "x")
    tok, _ = load(cfg)
    (cut, ids), (whole, _) = load_problems(cfg, "test", tok)
    assert 195 <= len(ids) <= 200 and ids == tok.chat(cut.prompt)
    assert long.startswith(cut.document) and cut.prompt.endswith("\n\nSummary:")
    assert cut.before == whole.before and whole.document == "long text"
    assert "1 of 2 test documents cut to --max-prompt 200" in capsys.readouterr().out
    with pytest.raises(BadInput, match="expected at most --max-prompt 10"):
        load_problems(parse([*argv, "10"], "x"), "test", tok)


@pytest.mark.parametrize("md5,fine", [("right", True), ("wrong", False), (None, True)])
def test_a_download_is_checked_against_the_stated_checksum(md5, fine, tmp_path, monkeypatch):
    body = (json.dumps(ROWS["tldr"]) + "\n").encode()
    stated = b64encode(hashlib.md5(body if md5 == "right" else b"x").digest()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            if md5:
                self.send_header("Content-MD5", stated)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(TASKS["tldr"], "ADDRESS",
                        f"http://127.0.0.1:{server.server_port}/{{split}}.jsonl")
    kept = tmp_path / "shadow-mask-distillation" / "tldr" / "test.jsonl"
    try:
        if fine:
            assert TASKS["tldr"].load("test", None)[0].answer == "q" and kept.is_file()
        else:
            with pytest.raises(BadInput, match="downloaded checksum .*, expected"):
                TASKS["tldr"].load("test", None)
            assert not kept.exists()
    finally:
        server.shutdown()


@pytest.mark.parametrize("task, change", [
    ("tldr", {"title": None}), ("govreport", {"report": 5}), ("hotpotqa", {"answer": None}),
    ("hotpotqa", {"context": [{"title": "T", "text": None}]}), ("hotpotqa", {"context": []}),
    ("hotpotqa", {"context": ["The first paragraph.", "Second"]}),
    ("hotpotqa", {"context": [["T", "a text"]]}), ("hotpotqa", {"context": "T"})])
def test_a_row_of_another_kind_is_named(task, change, tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps(ROWS[task]) + "\n" + json.dumps({**ROWS[task], **change}) + "\n")
    with pytest.raises(BadInput, match=r"test\.jsonl:2: .*expected an object with.*mend the line"):
        TASKS[task].load("test", str(tmp_path))


def test_rows_of_the_hugging_face_set(tmp_path):
    row = {**ROWS["hotpotqa"], "context": {"title": ["T", "U"], "sentences": [["A b.", " C."], []]}}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(ROWS["hotpotqa"]))
    one, two = TASKS["hotpotqa"].load("test", str(tmp_path))
    assert one.document == two.document == "T: A b. C.\nU: "


def test_generated_reports_do_not_contradict_themselves():
    for i in range(200):
        p = texts.problem("govreport", "test", i)
        body, lack = re.search(r"the (\w+) program lacks (\w+)", p.answer).groups()
        item = re.search(r"Costs of (\w+) rose", p.answer)[1]
        assert f"The {body} program has" not in p.document
        assert f"Costs of {item} did not" not in p.document
        assert all(x in p.document for x in re.findall(r"[^.]+\.", p.answer.strip()))


def look_up(question: str, document: str) -> str:
    """The answer to a generated question, from the paragraphs alone."""
    def fact(pattern: str) -> str:
        (found,) = re.findall(pattern, document)
        return found
    a, *b = re.findall(r"[A-Z][a-z]+", question.partition(" ")[2])
    if "friend" in question:
        return fact(fact(rf"{a} met (\w+)\.") + r" sells (\w+)\.")
    home = fact(rf"{a} left (\w+)\.")
    if b:
        return "yes" if home == fact(rf"{b[0]} left (\w+)\.") else "no"
    return fact(home + (r" joined (\w+)\." if "land" in question else r" makes (\w+)\."))


def test_generated_questions_have_the_answer_that_the_paragraphs_give():
    kinds = set()
    for i in range(300):
        p = texts.problem("hotpotqa", "test", i)
        assert look_up(p.after.strip().removeprefix("Question: "), p.document) == p.answer
        kinds.add(re.sub("[A-Z][a-z]+", "X", p.after))
    assert len(kinds) == 4


def test_what_a_task_has_not():
    with pytest.raises(BadInput, match="govreport: expected --data-dir"):
        TASKS["govreport"].load("test", None)
    cfg = parse(["--task", "tldr", "--shots", "2"], "x")
    with pytest.raises(BadInput, match="--shots 2: only --task gsm8k"):
        load_problems(cfg, "test", load(cfg)[0])
    cfg = parse(["--task", "gsm8k", "--shots", "2"], "x")
    with pytest.raises(BadInput, match="--shots 2: the generated problems have their own"):
        load_problems(cfg, "test", load(cfg)[0])
    with pytest.raises(BadInput, match="--data-dir: got an empty name"):
        parse(["--task", "govreport", "--data-dir", ""], "x")


def test_a_reward_that_fails_abstains():
    p = Problem(0, "", "1")
    assert worth(lambda text, p: 0.5, "", p) == 0.5
    for bad in (lambda t, p: 1 / 0, lambda t, p: None, lambda t, p: 1e999, lambda t, p: t[9]):
        value = worth(bad, "", p)
        assert value != value


@pytest.mark.weights
@pytest.mark.skipif(not {"SMD_MODEL", "SMD_DATA"} <= os.environ.keys(),
                    reason="SMD_MODEL and SMD_DATA name no checkpoint and no folder of tasks' rows")
@pytest.mark.parametrize("task", TASKS)
def test_a_step_of_a_real_model_on_real_rows(task, tmp_path):
    """SMD_DATA holds a folder a task with its train.jsonl and test.jsonl."""
    out = tmp_path / "run"
    train.run(parse(["--task", task, "--model", os.environ["SMD_MODEL"], "--data-dir",
                     f"{os.environ['SMD_DATA']}/{task}", "--steps", "1", "--prompts", "2",
                     "--group", "2", "--keep", "0.5", "--max-prompt", "2000", "--max-new", "48",
                     "--limit", "0", "--eval-every", "0", "--out", str(out)], "x"))
    (row,) = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    assert row["step/skipped"] == 0 and 0 < row["grad/norm"] < math.inf
    assert row["distill/kl"] > 0.01
    if row["reward/dead_group_frac"] < 1:  # else there is nothing to compare
        assert row["mismatch/logp_abs_mean"] < 0.05  # bfloat16 rounding
    assert row["kv/bytes_peak"] < row["kv/bytes_dense"]
    samples = [json.loads(x) for x in (out / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4 and max(x["prompt_tok"] for x in samples) <= 2000
