"""Data sets of the Hugging Face hub, against a tiny hub on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from builders import texts_of
from corpora import written
from fake_hub import COMMIT, FakeHub, environment_for

from marin_build.data.shards import TokenizedSet
from marin_build.recipe import schema
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.sources import HuggingFaceSource, JsonLines, Parquet
from marin_build.recipe.target import parse_target

DRIVER = """
import logging, sys
from pathlib import Path
from builders import Workbench
from marin_build.artifact.context import Dependency
from marin_build.data import raw, tokenize
from marin_build.errors import MarinError
from marin_build.recipe import schema
logging.basicConfig(level=logging.INFO)
bench, kind, text = Workbench(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
try:
    if kind == "raw":
        raw.build(bench.context("raw/hub/dev", schema.RawRecipe.model_validate_json(text)))
    else:
        recipe = schema.TokenizedRecipe.model_validate_json(text)
        tokenize.build(bench.context("tokenized/hub/dev", recipe, bench.bytes_tokenizer(), processes=int(sys.argv[4])))
except MarinError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
PINNING = """
import sys
from marin_build.errors import MarinError
from marin_build.pin import pin
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import parse_target
try:
    print(pin(RecipeBook(sys.argv[1]), parse_target(sys.argv[2]), *sys.argv[3:]))
except MarinError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
TEXTS = [f"good {number}" for number in range(300)]
FILES = {
    "README.md": b"# texts",
    "data/train-00000-of-00002.parquet": written("parquet", TEXTS[:100]),
    "data/train-00001-of-00002.parquet": written("parquet", TEXTS[100:200]),
    "data/validation-00000-of-00001.parquet": written("parquet", TEXTS[200:]),
    "small/a.jsonl": written("jsonl", TEXTS[:10]),
    "small/deep/b.jsonl.zst": written("jsonl.zst", TEXTS[10:20]),
}
PARQUET, LINES = Parquet(type="parquet", text_key="text"), JsonLines(type="jsonl", text_key="text")


@pytest.fixture
def hub():
    fake = FakeHub({"datasets/someone/texts": dict(FILES)})
    yield fake
    fake.server.shutdown()


class Client:
    def __init__(self, hub: FakeHub, folder: Path) -> None:
        self.hub, self.folder = hub, folder

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        usual = environment_for(self.hub, self.folder / "hf")
        return subprocess.run(
            [sys.executable, *arguments], env={**usual, **environment}, capture_output=True, text=True, timeout=120
        )

    def raw(self, *files: str, id: str = "someone/texts", revision: str = COMMIT, **environment: str):
        recipe = schema.RawRecipe(source=source(*files, id=id, revision=revision))
        return self.run("-c", DRIVER, str(self.folder / "bench"), "raw", recipe.model_dump_json(), **environment)

    def tokenized(self, *files: str, format, processes: int = 1, **environment: str):
        recipe = schema.TokenizedRecipe(
            tokenizer="tokenizers/bytes/dev",
            source=source(*files),
            format=format,
            add_bos=False,
            add_eos=True,
            shard_bytes=2000,
            token_budget=environment.pop("token_budget", None),
            max_bad_documents=0,
        )
        arguments = ("-c", DRIVER, str(self.folder / "bench"), "tokenized", recipe.model_dump_json(), str(processes))
        return self.run(*arguments, **environment)

    @property
    def made(self) -> Path:
        return self.folder / "bench/raw/hub/dev"

    @property
    def token_set(self) -> TokenizedSet:
        return TokenizedSet.open(self.folder / "bench/tokenized/hub/dev")


@pytest.fixture
def client(hub, tmp_path) -> Client:
    return Client(hub, tmp_path)


def source(*files: str, id: str = "someone/texts", revision: str = COMMIT) -> HuggingFaceSource:
    return HuggingFaceSource(type="huggingface", id=id, revision=revision, files=list(files))


def last_line(run: subprocess.CompletedProcess[str]) -> str:
    """The first line of the error."""
    assert "Traceback" not in run.stderr, run.stderr
    lines = [line for line in run.stderr.splitlines() if not line.startswith(("INFO", "WARNING", "  "))]
    return lines[-1]


# ---- raw -------------------------------------------------------------------------------------------------------------


def test_a_raw_artifact_holds_the_files_of_the_commit_and_no_others_are_fetched(client, hub):
    run = client.raw("small/**/*", "data/valid*.parquet")
    assert run.returncode == 0, run.stderr
    made = {path.relative_to(client.made).as_posix() for path in client.made.rglob("*") if path.is_file()}
    assert made == {"small/a.jsonl", "small/deep/b.jsonl.zst", "data/validation-00000-of-00001.parquet"}
    assert all((client.made / name).read_bytes() == FILES[name] for name in made)
    assert not [path for path in hub.asked if "train" in path]


def test_a_second_attempt_keeps_what_is_intact_and_needs_no_network(client, hub):
    assert client.raw("small/**/*").returncode == 0
    (client.made / "small/a.jsonl").write_bytes(b"x" * len(FILES["small/a.jsonl"]))
    hub.asked.clear()
    run = client.raw("small/**/*", HF_HUB_OFFLINE="1")
    assert run.returncode == 0, run.stderr
    assert (client.made / "small/a.jsonl").read_bytes() == FILES["small/a.jsonl"]
    assert hub.asked == []


def test_a_short_commit_is_enough_and_the_whole_one_is_asked_for(client, hub):
    run = client.raw("small/*", revision=COMMIT[:7])
    assert run.returncode == 0, run.stderr
    assert f"/datasets/someone/texts/resolve/{COMMIT}/small/a.jsonl" in hub.asked


def test_bytes_that_the_hub_says_otherwise_of_are_not_committed(client, hub):
    hub.spoiled.add("small/deep/b.jsonl.zst")
    run = client.raw("small/**/*")
    assert run.returncode == 1
    assert "b.jsonl.zst" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (client.made / "small/deep/b.jsonl.zst").exists()


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        ({"revision": "f" * 40}, f"someone/texts has no commit {'f' * 40}", 2),
        ({"id": "someone/nothing"}, "there is no repository someone/nothing on the hub, or this account may not", 2),
        ({"id": "someone/gated"}, f"someone/gated at {COMMIT} is gated and this account has no access to it", 2),
    ],
)
def test_a_missing_commit_repository_or_permission_is_said(client, arguments, message, code):
    run = client.raw("*", **arguments)
    assert run.returncode == code
    assert last_line(run).startswith(message)


def test_a_glob_without_a_file_is_said_with_some_that_there_are(client):
    run = client.raw("*.txt")
    assert run.returncode == 2
    assert last_line(run) == f"someone/texts at {COMMIT} has no file that matches '*.txt'"
    assert "it has: README.md, data/train-00000-of-00002.parquet" in run.stderr


def test_without_network_and_cache_it_says_what_is_missing_and_what_to_do(client):
    run = client.raw("small/*", HF_HUB_OFFLINE="1")
    assert run.returncode == 1
    assert last_line(run).startswith(
        f"the list of files of someone/texts at {COMMIT} is not in the local cache and the hub cannot be reached: "
    )
    assert "name them in a source of type files" in run.stderr
    assert client.raw("small/*").returncode == 0
    run = client.raw("data/*", HF_HUB_OFFLINE="1")
    assert run.returncode == 1
    assert last_line(run).startswith(f"data/train-00000-of-00002.parquet of someone/texts at {COMMIT} is not in the")


def test_a_hub_that_cannot_be_reached_is_one_line(client):
    run = client.raw("small/*", HF_ENDPOINT="http://127.0.0.1:9")
    assert run.returncode == 1
    assert "the hub cannot be reached" in last_line(run)


# ---- tokenized -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
def test_tokens_are_made_of_a_data_set_without_a_raw_artifact(client, processes):
    run = client.tokenized("data/train-*.parquet", format=PARQUET, processes=processes)
    assert run.returncode == 0, run.stderr
    assert texts_of(client.token_set) == TEXTS[:200]


def test_the_digest_of_the_hub_is_what_the_bytes_are_compared_with(client, hub):
    hub.spoiled.add("data/train-00001-of-00002.parquet")
    run = client.tokenized("data/train-*.parquet", format=PARQUET)
    assert run.returncode == 1
    assert "train-00001-of-00002.parquet" in last_line(run)


def test_files_that_a_token_budget_does_not_need_are_not_fetched(client, hub):
    run = client.tokenized("data/train-*.parquet", format=PARQUET, token_budget=schema.TokenBudget(tokens=10, seed=0))
    assert run.returncode == 0, run.stderr
    assert len({path for path in hub.asked if path.endswith(".parquet")}) == 1


# ---- pinning ---------------------------------------------------------------------------------------------------------

PAGE = """# raw/texts/2026.06.28
source:
  type: huggingface # a comment
  id: someone/texts
  revision: unresolved
  split: validation
  files: [unresolved] # of the split

measure:
  description: ""
"""
TEXT = parse_target("raw/texts/2026.06.28")


@pytest.fixture
def book(tmp_path) -> RecipeBook:
    path = tmp_path / "config" / f"{TEXT}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(PAGE)
    return RecipeBook(tmp_path / "config")


def test_pin_writes_the_commit_and_the_files_of_a_split(client, book):
    run = client.run("-c", PINNING, str(book.folder), str(TEXT))
    assert run.returncode == 0, run.stderr
    assert f"source.revision: unresolved → {COMMIT}, source.files: the 1 files of split validation" in run.stdout
    pinned = book.load(TEXT).source
    assert (pinned.revision, pinned.files) == (COMMIT, ["data/validation-00000-of-00001.parquet"])
    text = book.path(TEXT).read_text()
    assert "type: huggingface # a comment" in text
    assert "] # of the split" in text
    again = client.run("-c", PINNING, str(book.folder), str(TEXT))
    assert "is pinned to" in again.stderr


@pytest.mark.parametrize("style", ["[unresolved]", "\n    - unresolved"])
def test_several_files_are_written_one_a_line_in_the_style_of_the_page(client, book, style):
    page = PAGE.replace("[unresolved]", style).replace("split: validation", "split: train")
    book.path(TEXT).write_text(page)
    run = client.run("-c", PINNING, str(book.folder), str(TEXT), COMMIT)
    assert run.returncode == 0, run.stderr
    files = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert book.load(TEXT).source.files == files
    text = book.path(TEXT).read_text()
    assert all(sum(file in line for line in text.splitlines()) == 1 for file in files)
    assert not [line for line in text.splitlines() if all(file in line for file in files)]
    assert text.count("# of the split") == 1


def test_pin_names_the_splits_that_there_are(client, book):
    book.path(TEXT).write_text(PAGE.replace("split: validation", "split: dev"))
    run = client.run("-c", PINNING, str(book.folder), str(TEXT))
    assert run.returncode == 2
    assert last_line(run) == f"someone/texts at {COMMIT} has no split 'dev'; it has: train, validation"
    assert book.path(TEXT).read_text() == PAGE.replace("split: validation", "split: dev")


def test_pinning_a_split_without_a_network_names_the_way_out(client, book):
    run = client.run("-c", PINNING, str(book.folder), str(TEXT), COMMIT, HF_HUB_OFFLINE="1")
    assert run.returncode == 1
    assert run.stderr.startswith(f"the files of someone/texts at {COMMIT} cannot be looked up through datasets: ")
    assert "name them yourself: files:" in run.stderr
    assert book.path(TEXT).read_text() == PAGE
