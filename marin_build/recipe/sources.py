"""Where text comes from, and in which format its documents are."""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import Field, StringConstraints, model_validator

from marin_build.recipe.fields import (
    UNRESOLVED,
    Digest,
    HubName,
    Model,
    PositiveInt,
    RawTarget,
    RelativeGlob,
    RepositoryName,
    Revision,
    Said,
    added_later,
)


class EmbeddedSource(Model):
    """Text that is shipped with the package, in `marin_build/data/corpora/<corpus>/`."""

    type: Literal["embedded"]
    corpus: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$"), Said("lower-case letters, digits and '_'")]
    digest: Digest
    """Root digest over (path, bytes, xxh3_128) of its files."""


class FilesSource(Model):
    """Files on this machine, relative to the working directory or absolute, or in a store; pinned by their digest."""

    type: Literal["files"]
    paths: Annotated[list[str], Field(min_length=1)]
    """Paths, URLs (gs://, s3:// and whatever else fsspec knows) or globs, in this order; the matches of one glob are
    sorted."""
    digest: Digest


class HuggingFaceSource(Model):
    """A repository of the Hugging Face hub, pinned by a commit."""

    type: Literal["huggingface"]
    id: HubName
    revision: Revision
    files: Annotated[list[RelativeGlob], Field(min_length=1)]
    """Paths or globs within it. `[unresolved]`: `marin-build pin` writes the files of `config` and `split`."""
    config: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = added_later(None)
    """Which configuration of the data set `pin` looks at; null: its only or default one."""
    split: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = added_later(None)
    """Which split of it."""

    @model_validator(mode="after")
    def _resolvable(self) -> HuggingFaceSource:
        if UNRESOLVED in self.files and self.split is None:
            raise ValueError("unresolved files need a split, whose files `marin-build pin` then writes")
        return self


class GitHubSource(Model):
    """Files of a GitHub repository, pinned by a commit."""

    type: Literal["github"]
    repository: RepositoryName
    revision: Revision
    files: Annotated[list[RelativeGlob], Field(min_length=1)]


class ArtifactSource(Model):
    """Files of a raw artifact: a dependency."""

    type: Literal["artifact"]
    target: RawTarget
    files: Annotated[list[RelativeGlob], Field(min_length=1)]


RawSource = Annotated[Union[EmbeddedSource, FilesSource, HuggingFaceSource, GitHubSource], Field(discriminator="type")]
TokenizerFileSource = Annotated[Union[FilesSource, HuggingFaceSource], Field(discriminator="type")]
TextSource = Annotated[Union[ArtifactSource, FilesSource, HuggingFaceSource, GitHubSource], Field(discriminator="type")]


# ---- text formats ----------------------------------------------------------------------------------------------------


class Documents(Model):
    """What formats have in common."""

    max_documents_per_file: PositiveInt | None = added_later(None)
    """Read the first so many documents of each file, with those that have no text; null: all. Files are then read
    whole, one process each."""


class JsonLines(Documents):
    """One JSON object a line; plain, .gz or .zst by the file's ending."""

    type: Literal["jsonl"]
    text_key: str


class PlainText(Documents):
    """Text files; plain, .gz or .zst by the file's ending."""

    type: Literal["text"]
    document: Literal["file", "line", "paragraph"]


class JsonArray(Documents):
    """Files that each hold one JSON array; plain, .gz or .zst by the file's ending. A file is read whole."""

    type: Literal["json_array"]
    text_key: str | None
    """Key of the text in each object; null: the array holds the texts themselves."""


class Parquet(Documents):
    """Parquet files, one document a row."""

    type: Literal["parquet"]
    text_key: str
    """The column of the text."""


class Arrow(Documents):
    """Arrow streams or files (Feather 2), such as `datasets` keeps, one document a row."""

    type: Literal["arrow"]
    text_key: str
    """The column of the text."""


Role = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=40),
    Said("lower-case letters, digits and '_'"),
]


class Chat(Documents):
    """JSON lines of conversations, rendered by the tokenizer's chat template, which also says what is trained on."""

    type: Literal["chat"]
    messages_key: str
    """Key of the list of messages, each an object with `role` and `content`, a text."""
    roles: Annotated[list[Role], Field(min_length=1)]
    """Roles that a message may have."""
    ignored_keys: list[str] = Field(default=[])
    """Other keys that messages may have, which are left out. Any that is not named here makes a record unusable."""

    @property
    def known_keys(self) -> list[str]:
        return ["role", "content", *self.ignored_keys]


ROW_FORMATS = (JsonArray, Parquet, Arrow)
"""Formats of files that are read as a whole, and whose documents have numbers."""

TextFormat = Annotated[Union[JsonLines, JsonArray, PlainText, Parquet, Arrow], Field(discriminator="type")]
DocumentFormat = Annotated[Union[JsonLines, JsonArray, PlainText, Parquet, Arrow, Chat], Field(discriminator="type")]
