from __future__ import annotations

import subprocess

import huggingface_hub
import pytest

from marin_build.errors import MarinError, RequestError
from marin_build.pin import pin
from marin_build.recipe.dependencies import unresolved
from marin_build.recipe.target import parse_target

FILES, HUB, CODE = (parse_target(f"raw/{name}") for name in ("files/2026.06.28", "hub/2026.06.28", "code/2026.06.28.1"))
ADOPTED = parse_target("tokenizers/hub/2026.06.28")


@pytest.fixture
def place(recipe_tree, tmp_path, monkeypatch):
    """The recipes, in a working directory with two text files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text(name)
    recipe_tree.edit(str(FILES), ', "/data/more.txt"', "")
    return recipe_tree


def test_files_are_pinned_by_their_digest_and_only_the_value_changes(place):
    before = place.text(str(FILES))
    line = pin(place.book, FILES)
    digest = place.book.load(FILES).source.digest
    assert line == f"config/raw/files/2026.06.28.yaml: source.digest: unresolved → {digest}"
    assert place.text(str(FILES)) == before.replace("unresolved", digest)
    assert unresolved(place.book.load(FILES)) == []


def test_pinning_again_says_so_and_changes_nothing(place):
    pin(place.book, FILES)
    before = place.text(str(FILES))
    assert pin(place.book, FILES).endswith(" already")
    assert place.text(str(FILES)) == before


def test_other_bytes_or_another_name_are_another_digest(place, tmp_path):
    pin(place.book, FILES)
    first = place.book.load(FILES).source.digest
    (tmp_path / "texts" / "a.txt").write_text("b.txt")
    assert f"{first} → " in pin(place.book, FILES)
    (tmp_path / "texts" / "a.txt").write_text("a.txt")
    (tmp_path / "texts" / "a.txt").rename(tmp_path / "texts" / "c.txt")
    pin(place.book, FILES)
    assert place.book.load(FILES).source.digest != first


def test_the_pinned_digest_is_the_one_that_a_build_compares(place, workbench):
    from marin_build.data import raw

    pin(place.book, FILES)
    context = workbench.context("raw/files/dev", place.book.load(FILES))
    raw.build(context)
    assert (context.folder / "a.txt").read_text() == "a.txt"


def test_missing_files_are_named(place, tmp_path):
    (tmp_path / "texts" / "a.txt").unlink()
    (tmp_path / "texts" / "b.txt").unlink()
    with pytest.raises(RequestError, match=r"no source file matches 'texts/\*\.txt'"):
        pin(place.book, FILES)


def test_an_embedded_corpus_is_pinned(place):
    target = parse_target("raw/embedded/2026.06.28")
    assert "source.digest: 00112233445566778899aabbccddeeff → " in pin(place.book, target)


@pytest.mark.parametrize(("target", "field"), [(HUB, "source"), (CODE, "source"), (ADOPTED, "tokenizer.source")])
def test_a_given_commit_is_written_without_a_network(place, target, field):
    assert f"{field}.revision: " in pin(place.book, target, "89abcde")
    assert "revision: 89abcde" in place.text(str(target))


def test_a_commit_for_files_is_refused(place):
    with pytest.raises(RequestError, match="--revision 'abcdef0' is for repositories"):
        pin(place.book, FILES, "abcdef0")


def test_a_pinned_repository_does_not_move_by_itself(place):
    with pytest.raises(RequestError, match=r"is pinned to 65cd6fc\n  to move it: --revision COMMIT"):
        pin(place.book, HUB)


@pytest.mark.parametrize(
    "text",
    ["tokenizers/bpe/2026.06.28", "tokenizers/bytes/2026.06.28", str(parse_target("tokenized/bpe/train/2026.06.28"))],
)
def test_what_is_made_from_artifacts_has_nothing_to_pin(place, text):
    with pytest.raises(RequestError, match="has no source to pin"):
        pin(place.book, parse_target(text))


def test_the_newest_commit_of_the_hub_is_looked_up_by_kind(place, monkeypatch):
    asked = []

    class Api:
        def repo_info(self, repository, *, repo_type, revision, **_):
            asked.append((repository, repo_type, revision))
            return type("Info", (), {"sha": "f" * 40})

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    pin(place.book, ADOPTED)
    pin(place.book, HUB, "main")
    assert asked == [("gpt2", "model", None), ("allenai/paloma", "dataset", "main")]
    assert place.book.load(ADOPTED).tokenizer.source.revision == "f" * 40


def refused(monkeypatch):
    """A hub at a port where nobody answers."""
    api = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api(endpoint="http://127.0.0.1:9"))


def offline(monkeypatch):
    def raises(*_, **__):
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline mode is enabled\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", raises)


@pytest.mark.parametrize("network", [refused, offline])
def test_without_a_network_the_way_out_is_named(place, monkeypatch, network):
    network(monkeypatch)
    before = place.text(str(ADOPTED))
    with pytest.raises(MarinError, match=r"^the newest commit of gpt2 cannot be looked up: .*\n.*--revision COMMIT$"):
        pin(place.book, ADOPTED)
    assert place.text(str(ADOPTED)) == before


@pytest.fixture
def github(tmp_path, monkeypatch):
    """A repository that git finds in the place of github.com."""
    repository = tmp_path / "hub" / "owner" / "name"
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    repository.mkdir(parents=True)
    for command in (["init", "-q", "-b", "main"], ["commit", "-q", "--allow-empty", "-m", "first"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{tmp_path}/hub/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
    found = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


@pytest.mark.parametrize("revision", [None, "main", "v1"])
def test_a_commit_of_github_is_looked_up_with_git(place, github, revision):
    place.edit(str(CODE), "0123456789abcdef0123456789abcdef01234567", "unresolved")
    pin(place.book, CODE, revision)
    assert place.book.load(CODE).source.revision == github


def test_a_revision_that_github_does_not_have_is_refused(place, github):
    with pytest.raises(RequestError, match="owner/name has no revision 'v2'"):
        pin(place.book, CODE, "v2")


def test_a_repository_that_is_not_there_is_told_with_gits_words(place, github):
    place.edit(str(CODE), "owner/name", "owner/other")
    with pytest.raises(MarinError, match=r"cannot be looked up: fatal: "):
        pin(place.book, CODE, "main")
