"""The final model on the hub: huggingface_hub's own calls, to a server on loopback that stands for the hub."""

import base64
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.runs import command, environment, prepared

REPOSITORY = "someone/tuned"


class Hub(ThreadingHTTPServer):
    """Answers what an upload asks, and keeps what it is sent. `is_down`: every commit fails."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.is_down = False
        self.tokens: set[str | None] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.add(self.headers["Authorization"])
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer(200, {"url": f"{self.server.address}/{REPOSITORY}"})
        elif self.path == f"/api/models/{REPOSITORY}/preupload/main":
            asked = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            self._answer(200, {"files": modes})
        elif self.path.startswith(f"/api/models/{REPOSITORY}/commit/main") and not self.server.is_down:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.address}/{REPOSITORY}/commit/0123"
            self._answer(200, {"commitUrl": url, "commitOid": "0123"})
        else:
            self._answer(500 if self.server.is_down else 404, {"error": f"no answer to {self.path}"})

    def do_GET(self) -> None:
        self._answer(200, {"id": REPOSITORY, "sha": "0", "private": True, "siblings": []})

    def _answer(self, code: int, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Nothing on the console."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def train(folder: Path, endpoint: str, *more: object) -> subprocess.CompletedProcess[str]:
    there = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_of_a_test", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    words = ("--plan", "plan1.json", "--data", "text.jsonl", "--steps", 1, "--out", "run", "--tokenizer", "byte")
    return subprocess.run(
        command(*words, "--set", f"train.push-to-hub={REPOSITORY}", *more), cwd=folder,
        env=os.environ | environment(folder) | there,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_the_final_model_is_uploaded_to_a_private_repository(tmp_path: Path, hub: Hub) -> None:
    prepared(tmp_path, 1)
    done = train(tmp_path, hub.address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"model uploaded: {hub.address}/{REPOSITORY}/commit/0123" in done.stderr
    assert {(each["name"], each["organization"], each["visibility"]) for each in hub.created} == {
        ("tuned", "someone", "private")
    }
    assert hub.tokens == {"Bearer hf_of_a_test"}
    saved = {path.name: path.read_bytes() for path in (tmp_path / "run" / "model").iterdir()}
    assert hub.files == saved
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= saved.keys()


@pytest.mark.exhaustive
def test_a_hub_that_fails_at_the_end_costs_nothing_but_the_upload(tmp_path: Path, hub: Hub) -> None:
    prepared(tmp_path, 1)
    hub.is_down = True
    done = train(tmp_path, hub.address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"warning: the model is saved, and could not be uploaded to {REPOSITORY}\n  because " in done.stderr
    assert f"hint: upload it later: hf upload {REPOSITORY} {tmp_path}/run/model ." in done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert hub.files == {}


def test_a_hub_that_cannot_be_asked_is_said_before_training(tmp_path: Path) -> None:
    prepared(tmp_path, 1)
    done = train(tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot make the repository {REPOSITORY} on the hub\n  because ")
    assert not (tmp_path / "run").exists()
