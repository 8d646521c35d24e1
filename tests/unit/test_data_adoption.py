"""Adopting a tokenizer from the Hugging Face hub, against a tiny hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import builders
import pytest
from builders import Workbench

from marin_build.data import adoption
from marin_build.data.tokenizer import load_tokenizer
from marin_build.errors import RequestError
from marin_build.recipe import schema
from marin_build.recipe.sources import FilesSource, HuggingFaceSource

COMMIT = "0123456789" * 4
SPECIALS = schema.SpecialTokens(bos="<|bos|>", eos="<|eos|>", pad=None)

DRIVER = """
import sys
from pathlib import Path
from builders import Workbench
from marin_build.data import tokenizer
from marin_build.errors import MarinError
from marin_build.recipe import schema
recipe = schema.TokenizerRecipe.model_validate_json(sys.argv[2])
try:
    tokenizer.build(Workbench(Path(sys.argv[1])).context("tokenizers/hub/dev", recipe))
except MarinError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


class FakeHub:
    """A hub with the repository `someone/tokenizer`, a gated one, and nothing else."""

    def __init__(self, files: dict[str, bytes]) -> None:
        hub, self.asked = self, []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.files = files
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.asked.append(path)
        repository, file = "/api/models/someone/tokenizer", f"/someone/tokenizer/resolve/{COMMIT}/"
        if path in (repository, f"{repository}/revision/{COMMIT}", f"{repository}/revision/{COMMIT[:7]}"):
            siblings = [{"rfilename": name} for name in self.files]
            send(request, 200, {"id": "someone/tokenizer", "sha": COMMIT, "siblings": siblings, "tags": []})
        elif path == f"{repository}/tree/{COMMIT}":
            send(
                request,
                200,
                [{"type": "file", "path": n, "size": len(d), "oid": oid(d)} for n, d in self.files.items()],
            )
        elif path.startswith(file) and path.removeprefix(file) in self.files:
            data = self.files[path.removeprefix(file)]
            send(request, 200, data, {"ETag": f'"{oid(data)}"', "X-Repo-Commit": COMMIT})
        elif path.startswith("/api/models/someone/gated"):
            send(request, 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        elif path.startswith("/api/models/someone/tokenizer"):
            send(request, 404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no"})
        else:
            send(request, 404, {"error": "no"}, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no"})


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def send(request: BaseHTTPRequestHandler, code: int, body: object, headers: dict[str, str] | None = None) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request.send_response(code)
    for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
        request.send_header(key, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    made = Workbench(tmp_path_factory.mktemp("hub")).bytes_tokenizer().folder
    files = {name: (made / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    files |= {
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": b"weights",
        "deep/er/tokenizer.json": b"{}",
    }
    fake = FakeHub(files)
    yield fake
    fake.server.shutdown()


@pytest.fixture
def adopt(tmp_path, hub):
    def run(
        *files: str, id: str = "someone/tokenizer", revision: str = COMMIT, **environment: str
    ) -> tuple[subprocess.CompletedProcess[str], Path]:
        source = HuggingFaceSource(type="huggingface", id=id, revision=revision, files=list(files or ("*.json",)))
        recipe = schema.TokenizerRecipe(
            tokenizer=schema.AdoptedTokenizer(
                method="adopt", source=source, vocabulary_size=258, special_tokens=SPECIALS
            )
        )
        kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        usual = {
            "PYTHONPATH": os.path.dirname(builders.__file__),
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-c", DRIVER, str(tmp_path / "bench"), recipe.model_dump_json()]
        run = subprocess.run(command, env={**kept, **usual, **environment}, capture_output=True, text=True, timeout=120)
        return run, tmp_path / "bench/tokenizers/hub/dev"

    return run


def first_line(run: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in run.stderr
    return next(line for line in run.stderr.splitlines() if line.startswith("tokenizers/hub/dev: "))


def test_a_tokenizer_is_taken_from_the_hub_at_its_commit_and_only_what_is_asked_for(adopt, hub):
    hub.asked.clear()
    run, folder = adopt("tokenizer*.json", "chat_template.jinja")
    assert run.returncode == 0, run.stderr
    assert (folder / "tokenizer.json").read_bytes() == hub.files["tokenizer.json"]
    assert (folder / "chat_template.jinja").read_bytes() == hub.files["chat_template.jinja"]
    assert load_tokenizer(folder).eos_id == 257
    assert not [path for path in hub.asked if "safetensors" in path]


def test_a_short_commit_is_enough(adopt):
    run, folder = adopt(revision=COMMIT[:7])
    assert run.returncode == 0, run.stderr
    assert load_tokenizer(folder).vocab_size == 258


def test_the_cache_of_the_hub_serves_without_a_network(adopt):
    assert adopt()[0].returncode == 0
    run, folder = adopt(HF_HUB_OFFLINE="1")
    assert run.returncode == 0, run.stderr
    assert load_tokenizer(folder).vocab_size == 258


def test_without_network_and_cache_it_says_so_and_what_to_do(adopt):
    run, folder = adopt(HF_HUB_OFFLINE="1")
    assert run.returncode == 1
    assert f"someone/tokenizer at {COMMIT} is not in the local cache and the hub cannot be reached" in first_line(run)
    assert "name them in a source of type files" in run.stderr
    assert not (folder / "tokenizer.json").exists()


def test_a_missing_commit_repository_or_permission_is_said(adopt):
    run, _ = adopt(revision="f" * 40)
    assert run.returncode == 2
    assert first_line(run).endswith(f"someone/tokenizer has no commit {'f' * 40}")
    run, _ = adopt(id="someone/nothing")
    assert run.returncode == 2
    assert "there is no repository someone/nothing on the hub" in first_line(run)
    run, _ = adopt(id="someone/gated")
    assert run.returncode == 2
    assert "is gated and this account has no access to it" in first_line(run)
    assert "HF_TOKEN" in run.stderr


def test_a_pattern_without_a_file_is_said(adopt):
    run, _ = adopt("tokenizer.json", "*.model")
    assert run.returncode == 2
    assert f"someone/tokenizer at {COMMIT} has no file that matches '*.model'" in first_line(run)


def test_two_files_of_one_name_are_refused(workbench, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
    source = FilesSource(type="files", paths=[f"{tmp_path}/**/tokenizer.json"], digest="0" * 32)
    from marin_build.data import sources

    source = source.model_copy(update={"digest": sources.files_digest(sources.find(source.paths))})
    recipe = schema.TokenizerRecipe(
        tokenizer=schema.AdoptedTokenizer(method="adopt", source=source, vocabulary_size=258, special_tokens=SPECIALS)
    )
    with pytest.raises(RequestError, match=r"tokenizer.source has two files named tokenizer.json; narrow its files"):
        adoption.adopted_files(workbench.context("tokenizers/hub/dev", recipe), source)
