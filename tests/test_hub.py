"""`--model ORG/NAME`: the real client of the hub against a server on this machine."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from data import stories

ROOT = Path(__file__).resolve().parents[1]
COMMIT = 40 * "a"
OTHERS = {"README.md": b"#", "pytorch_model.bin": b"x", "original/model.safetensors": b"x"}


class Hub(ThreadingHTTPServer):
    """Models org/tiny, org/gated, org/broken; `asked` holds the files that were fetched."""

    def __init__(self):
        self.asked, self.tokens = [], set()
        self.files = {p.name: p.read_bytes() for p in stories.MODEL.iterdir()} | OTHERS
        super().__init__(("127.0.0.1", 0), Handler)
        Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.partition("?")[0]
        hub, name = self.server, next((x for x in ("tiny", "gated", "broken")
                                       if f"org/{x}/" in path + "/"), None)
        hub.tokens.add(self.headers.get("Authorization"))
        if name is None:
            return self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="not found")
        if name == "gated" and "/resolve/" in path:
            return self.answer(403, X_Error_Code="GatedRepo", X_Error_Message="ask for access")
        if "/tree/" in path:
            return self.answer(200, json.dumps([
                {"type": "file", "path": key, "size": len(x), "oid": 40 * "b"}
                for key, x in hub.files.items()]).encode(), Content_Type="application/json")
        if path.startswith("/api/"):
            return self.answer(200, json.dumps({
                "id": f"org/{name}", "sha": COMMIT,
                "siblings": [{"rfilename": key} for key in hub.files]}).encode())
        key = path.partition(f"/resolve/{COMMIT}/")[2]
        hub.asked += [key] if self.command == "GET" else []
        body, headers = hub.files[key], {"ETag": f'"{key}"', "X_Repo_Commit": COMMIT}
        if name == "broken" and key == "model.safetensors" and self.command == "GET":
            self.send_response(200)
            for header, value in {**headers, "Content-Length": len(body)}.items():
                self.send_header(header.replace("_", "-"), str(value))
            self.end_headers()
            self.wfile.write(body[:1000])
            self.close_connection = True
            return None
        return self.answer(200, body, **headers)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = Hub()
    yield server
    server.shutdown()


def evaluate(model, home, port, **more):
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{port}", "no_proxy": "*",
            "OMP_NUM_THREADS": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "5", **more}
    return subprocess.run(
        [sys.executable, "eval.py", "--task", "gsm8k", "--model", model, "--data-dir", "stories",
         "--limit", "2", "--max-new", "4"], cwd=ROOT, env=env, capture_output=True, text=True)


def refused(done, *words):
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: --model ") and all(x in line for x in words), line
    assert "Traceback" not in done.stderr


def test_a_model_is_fetched_once_and_is_there_without_network(hub, tmp_path):
    done = evaluate("org/tiny", tmp_path, hub.server_port, HF_TOKEN="hf_secret")
    assert done.returncode == 0 and "greedy accuracy" in done.stdout, done.stderr
    assert sorted(hub.asked) == sorted(p.name for p in stories.MODEL.iterdir()), "what is read"
    assert "Bearer hf_secret" in hub.tokens and "Fetching" in done.stderr
    hub.asked.clear()
    assert evaluate("org/tiny", tmp_path, hub.server_port).stdout == done.stdout
    assert not hub.asked
    assert evaluate("org/tiny", tmp_path, 9, HF_HUB_OFFLINE="1").stdout == done.stdout
    assert evaluate("org/tiny", tmp_path, 9).stdout == done.stdout  # nobody there


def test_what_cannot_be_fetched_is_one_line(hub, tmp_path):
    refused(evaluate("org/wrong", tmp_path, hub.server_port), "org/wrong", "correct it")
    refused(evaluate("org/gated", tmp_path, hub.server_port), "org/gated", "accept its terms")
    refused(evaluate("org/tiny", tmp_path, 9), "not in the cache", "name a downloaded folder")
    refused(evaluate("org/tiny", tmp_path, 9, HF_HUB_OFFLINE="1"), "not in the cache")
    refused(evaluate("a/b/c", tmp_path, hub.server_port), "no such folder", "ORG/NAME")
    refused(evaluate("nothing", tmp_path, hub.server_port), "no such folder", "ORG/NAME")


def test_a_broken_download_is_one_line_and_goes_on(hub, tmp_path):
    refused(evaluate("org/broken", tmp_path, hub.server_port), "run again")
