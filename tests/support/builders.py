"""A bench for testing builders without the protocol around them: contexts and dependencies made by hand."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marin_build.artifact.context import BuildContext, BuildResult, Dependency
from marin_build.artifact.digest import file_entries, list_files, root_digest
from marin_build.recipe import schema, sources
from marin_build.recipe.fields import Model
from marin_build.recipe.target import parse_target
from marin_build.settings import Settings

if TYPE_CHECKING:
    from marin_build.data.shards import TokenizedSet


class Workbench:
    """Makes everything below one folder."""

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
            logs=place / "logs",
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

        recipe = self.tokenized_recipe(raw, tokenizer, files=files, **fields)
        context = self.context(self.TOKENS, recipe, raw, tokenizer, folder=folder, processes=processes)
        return context.folder, tokenize.build(replace(context, **given))

    def tokenized_recipe(
        self, raw: Dependency, tokenizer: Dependency, *, files: tuple[str, ...] = ("**/*",), **fields: Any
    ) -> schema.TokenizedRecipe:
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
        return schema.TokenizedRecipe(**{**usual, **fields})


def tokenized(workbench: Workbench, data: bytes, name: str = "corpus.jsonl", **fields: Any) -> TokenizedSet:
    """The token set of one file, a byte an id."""
    from marin_build.data.shards import TokenizedSet

    folder, _ = workbench.tokenize(workbench.raw({name: data}), workbench.bytes_tokenizer(), files=(name,), **fields)
    return TokenizedSet.open(folder)


def texts_of(token_set: TokenizedSet) -> list[str]:
    """The documents of a set of bytes, without the EOS after each."""
    texts = []
    for shard in token_set.shards:
        for start, end in pairwise(shard.offsets):
            assert shard.ids[end - 1] == 257
            texts.append(bytes(shard.ids[start : end - 1].tolist()).decode())
    return texts
