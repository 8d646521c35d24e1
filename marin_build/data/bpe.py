"""Trains byte-level BPE on the documents of raw artifacts: all 256 bytes, then merges, by the counts of the whole text.

The same text gives the same merges, whatever its order and the number of threads; another version of the library may
break ties differently.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from marin_build.artifact.context import BuildContext
from marin_build.data.documents import Rejection, place_of, read_document, units
from marin_build.data.progress import Progress
from marin_build.data.reading import Reading, check_format
from marin_build.data.sources import SourceFile, artifact_files
from marin_build.errors import RequestError, Stopped
from marin_build.recipe.schema import TrainedTokenizer
from marin_build.recipe.sources import TextFormat

BYTES = 256
BATCH_DOCUMENTS = 256

TextFile = tuple[SourceFile, TextFormat]


def train(context: BuildContext, wanted: TrainedTokenizer, metrics: dict[str, float | int]) -> Tokenizer:
    """A tokenizer without its special tokens; counts of the text go into `metrics`.

    Raises:
        RequestError: unusable text, a regular expression that is none, or a vocabulary size that cannot be had.
        DamageError: a source file is not what its record says.
        Stopped: a signal came.
    """
    specials = len(wanted.special_tokens.given)
    size = wanted.vocabulary_size - specials
    if size < BYTES:
        raise RequestError(
            f"{context.target}: tokenizer.vocabulary_size {wanted.vocabulary_size} is too small: "
            f"needs at least {BYTES + specials}, for {BYTES} bytes and {specials} special tokens"
        )
    tokenizer, files = _untrained(context, wanted.split_regex), _files(context, wanted)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    with Progress(context.logger, "training the tokenizer", sum(file.bytes for file, _ in files)) as progress:
        tokenizer.train_from_iterator(_batches(context, files, progress, metrics), trainer)
    if tokenizer.get_vocab_size() < size:
        raise RequestError(
            f"{context.target}: the text gives only {tokenizer.get_vocab_size() + specials:,} ids of the "
            f"tokenizer.vocabulary_size {wanted.vocabulary_size:,}; lower it, or train on more text"
        )
    return tokenizer


def _untrained(context: BuildContext, split_regex: str) -> Tokenizer:
    try:
        expression = Regex(split_regex)
    except Exception as error:  # the library raises nothing narrower
        raise RequestError(f"{context.target}: tokenizer.split_regex is not a regular expression: {error}") from None
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(expression, behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _files(context: BuildContext, wanted: TrainedTokenizer) -> list[TextFile]:
    files: list[TextFile] = []
    for text in wanted.text:
        files += [(file, text.format) for file in artifact_files(context.dependencies[text.target], text.files)]
    for file, format in files:
        check_format(file.name, format)
    return files


def _batches(
    context: BuildContext, files: list[TextFile], progress: Progress, metrics: dict[str, float | int]
) -> Iterator[list[str]]:
    """Documents of all files, a list of them at a time."""
    metrics |= {"training_documents": 0, "training_bytes": 0}
    batch: list[str] = []
    for file, format in files:
        for text in _documents(context, file, format, progress):
            batch.append(text)
            metrics["training_documents"] += 1
            metrics["training_bytes"] += len(text.encode())
            if len(batch) == BATCH_DOCUMENTS:
                yield batch
                batch = []
    if not metrics["training_documents"]:
        raise RequestError(f"{context.target}: tokenizer.text has no document with text")
    yield batch


def _documents(context: BuildContext, file: SourceFile, format: TextFormat, progress: Progress) -> Iterator[str]:
    """Documents of a file; one that is unusable stops the training, and so does a file of other bytes."""
    reading, at = Reading(file), 0
    for unit in units(reading.text(format), format):
        progress.add(reading.news())
        if context.stop_requested():
            raise Stopped("stopped by a signal while the tokenizer was trained; the same command starts it again")
        document = read_document(unit, at, format)
        if isinstance(document, str):
            yield document
        elif isinstance(document, Rejection) and document.is_bad:
            raise RequestError(
                f"{context.target}: {file.path}, {place_of(document.to_dict())}: {document.reason}: {document.detail}\n"
                "  repair the file, or train on others"
            )
        at += len(unit)
    progress.add(reading.news())
    reading.check()
