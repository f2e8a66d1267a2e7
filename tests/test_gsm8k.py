"""GSM8K: what counts as the final number, the prompts, the files and their download."""

from __future__ import annotations

import hashlib
import http.server
import json
import socket
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest

from data import gsm8k
from data.gsm8k import Problem, final_number, load, reward
from errors import BadInput

NUMBERS = [
    # plain numbers
    ("18", 18),
    ("18.", 18),
    ("18.0", 18),
    ("$18", 18),
    ("$18.50", Fraction(37, 2)),
    ("**18**", 18),
    ("1,234", 1234),
    ("1,234,567.", 1234567),
    ("3,4,5", 5),
    ("12,18", 18),
    ("1,2345", 2345),
    (".5", Fraction(1, 2)),
    ("3/4", Fraction(3, 4)),
    ("36 / 2", 18),
    ("1.5e3", 1500),
    ("2E-1", Fraction(1, 5)),
    ("1e999", 999),  # no exponent of three digits
    ("1e999999999", 999999999),
    ("50%", 50),
    (r"18\%", 18),
    (r"\$18", 18),
    ("18 dollars", 18),
    ("18 m^2", 18),
    ("it is...18", 18),
    ("That is it.18 apples", 18),
    # signs
    ("-5", -5),
    ("\u22125", -5),
    ("x = -5", -5),
    ("-$5", -5),
    (r"-\$5", -5),
    ("$-5$", -5),
    ("-.5", Fraction(-1, 2)),
    ("10-18", 18),
    ("10\u221218", 18),
    ("10 - 18", 18),
    ("(3+4)-18", 18),
    ("10%-18%", 18),
    ("- 18 apples", 18),
    ("mid-18", 18),
    ("10--18", 18),
    (r"\text{10}-18", 18),
    ("so...-5", -5),
    # nothing to read
    ("", None),
    (",", None),
    ("-", None),
    ("$.", None),
    ("eighteen", None),
    ("#### ", None),
    (r"\boxed{}", None),
    ("3/0", None),
    ("7 or 3/0", None),
    ("0/3", 0),
    ("9" * 1000, 10**1000 - 1),
    ("9" * 1001, None),
    ("1/" + "9" * 5000, None),
    # the last number of all
    ("First 7, then 9, so 18 apples", 18),
    # the hash rule
    ("#### 18.0", 18),
    ("#### 1,080", 1080),
    ("#### -5", -5),
    ("####18", 18),
    ("####\n18\nThat took 3 steps.", 18),
    ("#### 18 of 20\nThe 3 others left.", 18),
    ("#### 7\n#### 18", 18),
    ("So 18. #### ", 18),
    ("#### Total\n3 * 6 = 18", 18),
    # the box
    (r"\boxed{18}", 18),
    (r"\boxed {18}, not 9", 18),
    (r"$\boxed{18}$. Checked 2 times.", 18),
    ("\\boxed{18}\n#### 7", 18),
    (r"\boxed{17} no, \boxed{18}", 18),
    (r"\boxed{18} and \boxed{19", 18),
    (r"\boxed{18.}", 18),
    (r"\boxed{x = 18}", 18),
    (r"\boxed{1{,}234}", 1234),
    (r"\boxed{1\,234}", 1234),
    (r"\boxed{1,\!234}", 1234),
    (r"\boxed{\$18}", 18),
    (r"\boxed{18\%}", 18),
    (r"\boxed{\frac{3}{4}} of 9", Fraction(3, 4)),
    (r"\boxed{-\dfrac{3}{4}}", Fraction(-3, 4)),
    (r"\boxed{\text{18 apples}}, not 9", 18),
    (r"\boxed{18 \text{ cm}^2}", 18),
    (r"\boxed{18\text{ m}^{3}}", 18),
    (r"\boxed{\boxed{18}}, not 9", 18),
    (r"\boxed{\{18\}}, not 9", 18),
    (r"} \boxed{18} { 9", 18),
    (r"\boxed{18} {9}", 18),
    (r"\boxed{\mathbf{18}}, not 9", 18),
    ("#### 7 #### 18", 18),
    ("##### 18\n9", 18),
    # a box that says nothing falls through
    (r"so 7 \boxed{18", 18),
    (r"\boxed{18 and then 20", 20),
    (r"18 \boxed{}", 18),
    (r"\boxed{\text{none}} 18", 18),
    ("#### 18\n9 \\boxed{}", 18),
    (r"\boxed{3/0} 18", 18),
]


@pytest.mark.parametrize("text, value", NUMBERS, ids=lambda v: repr(v)[:40])
def test_final_number(text: str, value: int | Fraction | None) -> None:
    assert final_number(text) == value


@pytest.mark.parametrize(
    "completion, answer, value",
    [
        (r"6 * 3 = 18, so \boxed{18}", "18", 1.0),
        (r"\boxed{18.00}", "18", 1.0),
        (r"\boxed{36/2}", "18", 1.0),
        (r"\boxed{1080}", "1,080", 1.0),
        (r"\boxed{1,080}", "1080", 1.0),
        (r"\boxed{-18}", "18", 0.0),
        (r"\boxed{18.0000000000000001}", "18", 0.0),  # equal as floats
        (r"18 \boxed{17}", "18", 0.0),
        ("I do not know", "18", 0.0),
        ("", "0", 0.0),
        ("9" * 5000, "18", 0.0),
    ],
)
def test_reward(completion: str, answer: str, value: float) -> None:
    got = reward(completion, Problem(0, "", answer))
    assert got == value and type(got) is float


def test_a_reference_without_a_number_is_refused() -> None:
    with pytest.raises(AssertionError):
        reward("no answer", Problem(0, "", "none"))


DEGENERATE = ["1", "1,", "111,", "1/", "1.", "1e", "-", "{", "}", r"\boxed", r"\boxed{",
              r"\boxed{1", r"\boxed{}", r"\frac{", r"\frac{}", "####", "#### ",
              "m^", "{,}", " ", "\n"]


@pytest.mark.parametrize("unit", DEGENERATE)
def test_degenerate_text_takes_linear_time(unit: str) -> None:
    long = unit * (100_000 // len(unit))
    for text in (long, long + "}" * 10_000, r"\boxed{" * 5_000 + long + "}" * 5_000):
        start = time.perf_counter()
        final_number(text)
        assert time.perf_counter() - start < 1


# The files

TRAIN = [
    {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\nAll <<4*1=4>>4.\n#### 4"},
    {"question": "A\u2028B?", "answer": "1 < 3 > 2: <<1=1>>1, <<2=2>>2.\n#### 1,080"},
    {"question": "Below zero?", "answer": "1 < 2 > 0\n#### -3"},
]
TEST = [{"question": "Six threes?", "answer": "6 * 3 = <<6*3=18>>18\n#### 18"}]


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_bytes(lines(TRAIN))
    (tmp_path / "test.jsonl").write_bytes(lines(TEST))
    return tmp_path


REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def test_load_without_shots(folder: Path) -> None:
    assert load("train", str(folder)) == [
        Problem(0, "Two and two?" + REASON, "4"),
        Problem(1, "A\u2028B?" + REASON, "1,080"),
        Problem(2, "Below zero?" + REASON, "-3"),
    ]
    (folder / "train.jsonl").unlink()  # not needed for this:
    assert load("test", str(folder)) == [Problem(0, "Six threes?" + REASON, "18")]


SHOTS = (
    "Question: Two and two?\nAnswer: 2 + 2 = 4\nAll 4.\n\\boxed{4}\n\n"
    "Question: A\u2028B?\nAnswer: 1 < 3 > 2: 1, 2.\n\\boxed{1,080}\n\n"
)


def test_shots_come_from_the_training_rows(folder: Path) -> None:
    assert load("test", str(folder), shots=2) == [
        Problem(0, SHOTS + "Question: Six threes?" + REASON, "18")
    ]


def test_no_training_prompt_holds_its_own_answer(folder: Path) -> None:
    assert load("train", str(folder), shots=2) == [
        Problem(2, SHOTS + "Question: Below zero?" + REASON, "-3")
    ]


def test_last_newline_is_optional_and_crlf_is_read(folder: Path) -> None:
    expected = load("train", str(folder))
    path = folder / "train.jsonl"
    content = path.read_bytes()
    for same in (content[:-1], content.replace(b"\n", b"\r\n")):
        path.write_bytes(same)
        assert load("train", str(folder)) == expected


GOOD = lines(TRAIN[:1])
BAD_FILES = {
    "empty file": (b"", 1),
    "only a newline": (b"\n", 1),
    "empty line in the middle": (GOOD + b"\n" + GOOD, 2),
    "two newlines at the end": (GOOD + b"\n", 2),
    "invalid JSON": (GOOD + b'{"question": "a"\n' + GOOD, 2),
    "two rows on a line": (GOOD + GOOD[:-1] + GOOD, 2),
    "a list": (b"[1]\n", 1),
    "a number too long for int()": (b"9" * 5000 + b"\n", 1),
    "not UTF-8": (GOOD + GOOD + b'{"question": "\xff", "answer": "#### 1"}\n', 3),
    "no question": (lines([{"answer": "#### 1"}]), 1),
    "no answer": (lines([{"question": "a"}]), 1),
    "question not a string": (lines([{"question": 1, "answer": "#### 1"}]), 1),
    "answer not a string": (lines([{"question": "a", "answer": 1}]), 1),
    "answer without ####": (GOOD + lines([{"question": "a", "answer": "It is 18"}]), 2),
    "only a number": (GOOD + lines([{"question": "a", "answer": "18"}]), 2),
    "nothing after ####": (lines([{"question": "a", "answer": "18 ####"}]), 1),
    "a word after ####": (lines([{"question": "a", "answer": "#### many"}]), 1),
    "two numbers after ####": (lines([{"question": "a", "answer": "#### 18 of 20"}]), 1),
    "division by zero": (lines([{"question": "a", "answer": "#### 3/0"}]), 1),
}


def message(call) -> str:
    with pytest.raises(BadInput) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and "expected" in text and text.count("; ") >= 2
    return text


@pytest.mark.parametrize("content, line", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file_is_named_with_its_line(folder: Path, content: bytes, line: int) -> None:
    path = folder / "train.jsonl"
    path.write_bytes(content)
    assert message(lambda: load("train", str(folder))).startswith(f"{path}:{line}: ")
    message(lambda: load("test", str(folder), shots=1))
    load("test", str(folder))  # the other file is good


def test_missing_file_or_folder(folder: Path) -> None:
    for missing in (folder / "nowhere", folder / "train.jsonl"):  # the second is no folder
        text = message(lambda missing=missing: load("test", str(missing)))
        assert text.startswith(str(missing / "test.jsonl")) and "--data-dir FOLDER" in text
    (folder / "test.jsonl").unlink()
    assert str(folder / "test.jsonl") in message(lambda: load("test", str(folder)))
    (folder / "test.jsonl").mkdir()
    assert str(folder / "test.jsonl") in message(lambda: load("test", str(folder)))


def test_bad_arguments(folder: Path) -> None:
    for shots in (-1, 3):
        for split in ("train", "test"):
            text = message(lambda s=split, k=shots: load(s, str(folder), shots=k))
            assert f"--shots is {shots};" in text and "0 to 2" in text


# The download


class Server(http.server.ThreadingHTTPServer):
    """Serves `content` at every path and counts the requests."""

    content, status, promised, requests = lines(TEST), 200, None, 0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.requests += 1
        self.send_response(self.server.status)
        promised = self.server.promised or len(self.server.content)
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch):
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        use_address(monkeypatch, tmp_path, server.server_port)
        yield server
        server.shutdown()
        thread.join()


def use_address(monkeypatch, cache: Path, port: int) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(gsm8k, "ADDRESS", f"http://127.0.0.1:{port}/{{split}}.jsonl")
    monkeypatch.setitem(gsm8k.SHA256, "test", hashlib.sha256(lines(TEST)).hexdigest())


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


CACHED = "shadow-mask-distillation/gsm8k/test.jsonl"


def test_download_once(server: Server, tmp_path: Path, capsys) -> None:
    expected = [Problem(0, "Six threes?" + REASON, "18")]
    assert load("test", None) == expected
    address = f"http://127.0.0.1:{server.server_port}/test.jsonl"
    assert capsys.readouterr().out == f"downloading {address} to {tmp_path / CACHED}\n"
    assert files(tmp_path) == [CACHED]
    assert load("test", None) == expected
    assert capsys.readouterr().out == "" and server.requests == 1


def refused(server_port: int, tmp_path: Path, reason: str) -> None:
    text = message(lambda: load("test", None))
    assert f"http://127.0.0.1:{server_port}/test.jsonl" in text
    assert "--data-dir FOLDER" in text and reason in text
    assert files(tmp_path) == []
    folders = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")}
    assert folders <= {"shadow-mask-distillation", "shadow-mask-distillation/gsm8k"}


def test_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.content = lines(TEST).replace(b"18", b"19")
    refused(server.server_port, tmp_path, hashlib.sha256(server.content).hexdigest())


def test_cut_off_download_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.promised = len(server.content)
    server.content = server.content[:-9]
    refused(server.server_port, tmp_path, "")


def test_error_status(server: Server, tmp_path: Path) -> None:
    server.status = 404
    refused(server.server_port, tmp_path, "404")


def test_connection_refused_after_the_announcement(tmp_path: Path, monkeypatch, capsys) -> None:
    with socket.socket() as bound:  # bound but not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        use_address(monkeypatch, tmp_path, port)
        refused(port, tmp_path, "refused")
    assert capsys.readouterr().out.startswith(f"downloading http://127.0.0.1:{port}/test.jsonl")


def test_cache_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "shadow-mask-distillation").write_text("a file, not a folder")
    assert "--data-dir FOLDER" in message(lambda: load("test", None))


def test_a_named_folder_is_never_completed_from_the_network(server: Server, tmp_path: Path) -> None:
    message(lambda: load("test", str(tmp_path)))
    assert server.requests == 0
