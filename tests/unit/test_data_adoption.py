"""Adopting a tokenizer from the Hugging Face hub, against a tiny hub on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from builders import Workbench
from fake_hub import COMMIT, FakeHub, environment_for

from marin_build.data import adoption
from marin_build.data.tokenizer import load_tokenizer
from marin_build.errors import RequestError
from marin_build.recipe import schema
from marin_build.recipe.sources import FilesSource, HuggingFaceSource

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


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    made = Workbench(tmp_path_factory.mktemp("hub")).bytes_tokenizer().folder
    files = {name: (made / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    files |= {
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": b"weights",
        "deep/er/tokenizer.json": b"{}",
    }
    fake = FakeHub({"someone/tokenizer": files})
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
        command = [sys.executable, "-c", DRIVER, str(tmp_path / "bench"), recipe.model_dump_json()]
        usual = environment_for(hub, tmp_path / "hf")
        run = subprocess.run(command, env={**usual, **environment}, capture_output=True, text=True, timeout=120)
        return run, tmp_path / "bench/tokenizers/hub/dev"

    return run


def first_line(run: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in run.stderr
    return next(line for line in run.stderr.splitlines() if line.startswith("tokenizers/hub/dev: "))


def test_a_tokenizer_is_taken_from_the_hub_at_its_commit_and_only_what_is_asked_for(adopt, hub):
    hub.asked.clear()
    run, folder = adopt("tokenizer*.json", "chat_template.jinja")
    assert run.returncode == 0, run.stderr
    assert (folder / "tokenizer.json").read_bytes() == hub.files["someone/tokenizer"]["tokenizer.json"]
    assert (folder / "chat_template.jinja").read_bytes() == hub.files["someone/tokenizer"]["chat_template.jinja"]
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
