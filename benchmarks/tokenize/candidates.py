"""One way to turn JSON lines into tokens, in a process of its own; `compare.py` starts it and measures it.

    python candidates.py NAME TOKENIZER_FOLDER DOCUMENTS.jsonl OUTPUT_FOLDER

It imports nothing of marin_build, so that each way can run in an environment of its own, and prints one JSON object:
documents, tokens, and for bare encoders the CPU-seconds of their loop (texts in memory, nothing read or written).
No way adds special tokens, except Levanter's, which cannot be told not to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

BATCH = 1000
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Of Llama 3, for the library that does not read a tokenizer.json."""


def texts_of(documents: Path) -> list[str]:
    with documents.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(texts), BATCH):
        yield texts[first : first + BATCH]


class FlatIds:
    """What a bare encoder gives: ids [T] and lengths [N], digested as compare.py digests what others have written."""

    def __init__(self) -> None:
        import xxhash

        self._ids, self._lengths = xxhash.xxh3_128(), xxhash.xxh3_128()
        self.documents = self.tokens = 0

    def add(self, ids: Any, lengths: Any) -> None:
        import numpy as np

        self._ids.update(np.ascontiguousarray(ids, np.int32))
        self._lengths.update(np.ascontiguousarray(lengths, np.int64))
        self.documents, self.tokens = self.documents + len(lengths), self.tokens + len(ids)

    @property
    def digest(self) -> str:
        return self._ids.hexdigest()[:8] + self._lengths.hexdigest()[:8]


def bare(texts: list[str], encode: Callable[[Sequence[str]], tuple[Any, Any]]) -> dict[str, Any]:
    """Run the loop, then digest what it gave; only the loop is timed."""
    start = time.process_time()
    encoded = [encode(batch) for batch in batches(texts)]
    seconds = time.process_time() - start
    flat = FlatIds()
    for ids, lengths in encoded:
        flat.add(ids, lengths)
    return {"documents": flat.documents, "tokens": flat.tokens, "digest": flat.digest, "loop_cpu_seconds": seconds}


def fastokens_bare(tokenizer: Path, documents: Path, output: Path) -> dict[str, Any]:
    os.environ["FASTOKENS_BPE_THREADS"] = "1"
    import fastokens
    import numpy as np

    library = fastokens.Tokenizer.from_json_str((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))

    def encode(batch: Sequence[str]) -> tuple[Any, Any]:
        ids, offsets = library.encode_batch_flat(list(batch), False, True)
        return np.frombuffer(ids, np.uint32), np.diff(np.frombuffer(offsets, np.uint64).astype(np.int64))

    return bare(texts_of(documents), encode)


def tokenizers_bare(tokenizer: Path, documents: Path, output: Path) -> dict[str, Any]:
    import numpy as np

    library = _library(tokenizer)

    def encode(batch: Sequence[str]) -> tuple[Any, Any]:
        arrays = [np.array(e.ids, np.uint32) for e in library.encode_batch_fast(list(batch), add_special_tokens=False)]
        return np.concatenate(arrays), np.array([len(array) for array in arrays])

    return bare(texts_of(documents), encode)


def tiktoken_bare(tokenizer: Path, documents: Path, output: Path) -> dict[str, Any]:
    import numpy as np
    import tiktoken

    model = json.loads((tokenizer / "tokenizer.json").read_bytes())["model"]
    byte_of = _byte_of()
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in model["vocab"].items()}
    library = tiktoken.Encoding("bench", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})

    def encode(batch: Sequence[str]) -> tuple[Any, Any]:
        lists = library.encode_ordinary_batch(list(batch), num_threads=1)
        return np.concatenate([np.array(ids, np.uint32) for ids in lists]), np.array([len(ids) for ids in lists])

    return bare(texts_of(documents), encode)


def datasets_map(tokenizer: Path, documents: Path, output: Path) -> dict[str, Any]:
    """As most scripts do it: load_dataset, map in batches in two processes, save_to_disk."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(output / "home"), "TOKENIZERS_PARALLELISM": "false"}
    import datasets

    library = _library(tokenizer)
    datasets.disable_progress_bars()
    loaded = datasets.load_dataset("json", data_files=str(documents), split="train", cache_dir=str(output / "cache"))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [e.ids for e in library.encode_batch_fast(batch["text"], add_special_tokens=False)]}

    mapped = loaded.map(encode, batched=True, num_proc=2, remove_columns=loaded.column_names)
    mapped.save_to_disk(str(output / "saved"))
    return {"documents": mapped.num_rows}


def datatrove(tokenizer: Path, documents: Path, output: Path) -> dict[str, Any]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(output / "home"), "TOKENIZERS_PARALLELISM": "false"}
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(str(documents.parent), glob_pattern=documents.name),
        DocumentTokenizer(
            str(output / "saved"),
            tokenizer_name_or_path=str(tokenizer / "tokenizer.json"),
            eos_token=None,
            shuffle_documents=False,
        ),
    ]
    LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=str(output / "logs")).run()
    return {}


def levanter(tokenizer: Path, documents: Path, output: Path) -> dict[str, Any]:
    os.environ |= {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    from levanter.data.text._batch_tokenizer import BatchTokenizer
    from levanter.store.cache import write_levanter_cache
    from levanter.tokenizers import load_tokenizer

    processor = BatchTokenizer(load_tokenizer(str(tokenizer)))

    def records() -> Iterator[dict[str, Any]]:
        batch: list[dict[str, Any]] = []
        with documents.open(encoding="utf-8") as lines:
            for line in lines:
                batch.append({"text": json.loads(line)["text"]})
                if len(batch) == 128:
                    yield from processor(batch)
                    batch = []
        if batch:
            yield from processor(batch)

    write_levanter_cache(records(), str(output / "cache"), metadata={})
    return {}


def _library(tokenizer: Path) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    library.encode_special_tokens = True
    return library


def _byte_of() -> dict[str, int]:
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte) if byte in itself else chr(next(others)): byte for byte in range(256)}


WAYS = {
    "fastokens_bare": fastokens_bare,
    "tokenizers_bare": tokenizers_bare,
    "tiktoken_bare": tiktoken_bare,
    "datasets_map": datasets_map,
    "datatrove": datatrove,
    "levanter": levanter,
}


if __name__ == "__main__":
    name, *places = sys.argv[1:]
    print(json.dumps(WAYS[name](*map(Path, places))))
