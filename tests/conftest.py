"""Fixtures that every ring of tests may use."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from marin_build.artifact.context import BuildContext, BuildResult, Dependency
from marin_build.artifact.digest import file_entries, list_files, root_digest
from marin_build.recipe import schema, sources
from marin_build.recipe.fields import Model
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import parse_target
from marin_build.settings import Settings

settings.register_profile("patient", deadline=None)  # a busy machine is no failure
settings.load_profile("patient")

GOLDEN_RECIPES = Path(__file__).parent / "golden" / "recipes"


@dataclass(frozen=True)
class RecipeTree:
    """A folder of recipes that a test may edit."""

    folder: Path

    @property
    def book(self) -> RecipeBook:
        """A new book, so that edits are seen."""
        return RecipeBook(self.folder)

    def text(self, target: str) -> str:
        return self.book.path(parse_target(target)).read_text(encoding="utf-8")

    def write(self, target: str, text: str) -> None:
        path = self.book.path(parse_target(target))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def edit(self, target: str, old: str, new: str) -> None:
        """Replace the first `old` in a recipe."""
        text = self.text(target)
        assert old in text
        self.write(target, text.replace(old, new, 1))

    def fingerprint(self, target: str) -> str:
        return self.book.fingerprint(parse_target(target))


@pytest.fixture
def recipe_tree(tmp_path: Path) -> RecipeTree:
    """A copy of the golden recipes: every kind, every type of source, tokenizer and format, one tiny checkpoint."""
    return RecipeTree(Path(shutil.copytree(GOLDEN_RECIPES, tmp_path / "config")))


class Workbench:
    """Builders without the protocol around them: contexts and dependencies made by hand, below one folder."""

    RAW, BYTES, TOKENS = "raw/bench/dev", "tokenizers/bytes/dev", "tokenized/bench/dev"
    SPECIALS = schema.SpecialTokens(bos="<|bos|>", eos="<|eos|>", pad=None)
    JSON_LINES = sources.JsonLines(type="jsonl", text_key="text")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def context(
        self, target: str, recipe: Model, *dependencies: Dependency, folder: str | None = None, **settings: Any
    ) -> BuildContext:
        """A first attempt at a target, in its own folder below the bench or in the one named."""
        place = self.folder / (folder or target)
        place.mkdir(parents=True, exist_ok=True)
        return BuildContext(
            target=parse_target(target),
            recipe=recipe,
            fingerprint="0" * 32,
            folder=place,
            dependencies={str(dependency.target): dependency for dependency in dependencies},
            settings=Settings(**{"processes": 1, **settings}),
            logger=logging.getLogger("workbench"),
            stop_requested=lambda: False,
            check_lease=lambda: None,
        )

    def finished(self, target: str, folder: Path) -> Dependency:
        """What is in the folder, as a finished artifact."""
        entries = file_entries(folder, list_files(folder))
        record = {"fingerprint": "0" * 32, "digest": root_digest(entries), "files": entries}
        return Dependency(parse_target(target), folder, record)

    def raw(self, files: Mapping[str, bytes], target: str = RAW) -> Dependency:
        for name, data in files.items():
            path = self.folder / target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return self.finished(target, self.folder / target)

    def bytes_tokenizer(self, target: str = BYTES, specials: schema.SpecialTokens = SPECIALS) -> Dependency:
        """256 ids, one a byte, then the special tokens: <|bos|> is 256 and <|eos|> 257."""
        from marin_build.data import tokenizer

        recipe = schema.TokenizerRecipe(tokenizer=schema.BytesTokenizer(method="bytes", special_tokens=specials))
        context = self.context(target, recipe)
        tokenizer.build(context)
        return self.finished(target, context.folder)

    def tokenize(
        self,
        raw: Dependency,
        tokenizer: Dependency,
        *,
        files: tuple[str, ...] = ("**/*",),
        folder: str | None = None,
        processes: int = 1,
        given: Mapping[str, Any] = {},
        **fields: Any,
    ) -> tuple[Path, BuildResult]:
        """Build a token set of a raw artifact: `fields` change the recipe, `given` the context."""
        from marin_build.data import tokenize

        source = sources.ArtifactSource(type="artifact", target=str(raw.target), files=list(files))
        usual = {
            "tokenizer": str(tokenizer.target),
            "source": source,
            "format": self.JSON_LINES,
            "add_bos": False,
            "add_eos": True,
            "shard_bytes": 1 << 20,
            "token_budget": None,
            "max_bad_documents": 0,
        }
        recipe = schema.TokenizedRecipe(**{**usual, **fields})
        context = self.context(self.TOKENS, recipe, raw, tokenizer, folder=folder, processes=processes)
        return context.folder, tokenize.build(replace(context, **given))


@pytest.fixture
def workbench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path / "bench")
