"""The fault matrix: what may go wrong, how the tests make it go wrong, and what must be true then.

A test shows a row by `@pytest.mark.row(number)`. What nobody can test yet, because it is not built, is named here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One fault."""

    number: int
    fault: str
    injected: str
    """How tests bring it about."""
    expected: str
    missing: str | None = None
    """The part of the program without which the row, or a part of it, cannot be shown yet."""


ROWS = (
    Row(
        1,
        "killed at any system call of the commit",
        "strace kills at each call that changes a file; the same in process, call by call",
        "a reader finds the old record or the new one, whole; one plain rerun converges",
    ),
    Row(
        2,
        "killed at random while tokenizing",
        "SIGKILL of the process group after a random time, seeds printed",
        "a rerun gives the same root digest and does less than one sub-shard of each worker again",
    ),
    Row(
        3,
        "killed at random while training",
        "SIGKILL of the process group after a random time, seeds printed",
        "losses of the resumed training equal those of an undisturbed one to the bit (CPU)",
    ),
    Row(
        4,
        "killed between the data and the record",
        "strace kills as the record is opened for writing",
        "the bytes are checked and used again; no document is tokenized twice",
    ),
    Row(
        5,
        "full disk while a shard, a checkpoint, the record or the log is written",
        "small tmpfs; ENOSPC from the n-th write",
        "one line with the bytes needed, no record, the old version whole; a rerun goes on once there is room",
    ),
    Row(
        6,
        "failing disk on read or fsync",
        "EIO from read and fsync",
        "nothing is committed; the error names file and offset",
    ),
    Row(
        7,
        "truncated shard",
        "truncated after the build",
        "not served as finished; only that shard is made again",
    ),
    Row(
        8,
        "one flipped bit in a shard, weights or a record",
        "a bit flipped in place",
        "verify --full names the file; quick verification finds other sizes; the record has a checksum of its own",
    ),
    Row(
        9,
        "a shard deleted, or a foreign file in the folder",
        "unlink; a new file",
        "a missing shard is made again, it alone; a foreign file is left alone and listed by gc",
    ),
    Row(
        10,
        "lease of a dead process of this machine",
        "the owner is killed, or its process id is given out again",
        "replaced at once, with a line in the log",
    ),
    Row(
        11,
        "lease of a dead other machine",
        "a lease of an invented host with an old heartbeat",
        "replaced after the lease time and not before",
    ),
    Row(
        12,
        "two runners on one target",
        "started at the same instant, 100 rounds",
        "one builds, the other says who builds and ends at once (or waits, if asked); one record, no mixed bytes",
    ),
    Row(
        13,
        "two runners on disjoint targets, and the first ends",
        "a second run starts and ends beside a waiting builder",
        "what the other holds stays held",
    ),
    Row(
        14,
        "a builder paused past its lease, replaced, and woken",
        "SIGSTOP and SIGCONT",
        "it fails its fencing check and its bytes are dropped",
    ),
    Row(
        15,
        "a clock two days off, or stepping backwards during the work",
        "a clock library put in front of the C library's",
        "the same decisions, the same digests; the newest checkpoint is the one of the highest step",
    ),
    Row(
        16,
        "all modification times changed, as by a restored backup",
        "random times set on every file",
        "nothing runs again",
    ),
    Row(
        17,
        "SIGTERM with 25 seconds of grace",
        "SIGTERM while training",
        "a checkpoint is saved and verified, exit code 6, a retry goes on from it",
    ),
    Row(
        18,
        "SIGTERM during a save, twice, or while compiling",
        "SIGTERM at chosen points",
        "the last committed step stays; the end is prompt",
    ),
    Row(
        19,
        "a worker out of memory",
        "SIGKILL of a worker; limited address space; MemoryError",
        "the failure says out of memory and what to do; finished shards stay",
    ),
    Row(
        20,
        "NaN in batch k",
        "planted by a hook of the test",
        "stops at k; no checkpoint holds a NaN; the batch is written out; the step before is intact",
    ),
    Row(
        21,
        "the newest checkpoint is corrupt on resume",
        "each file of a step flipped, cut, deleted",
        "falls back to the newest whole step, says so and records it",
    ),
    Row(
        22,
        "recipe changed under the same version",
        "edited",
        "refused before any work with each field, the bump command and the exit code for drift",
    ),
    Row(
        23,
        "code changed during the work",
        "a module edited while a builder runs",
        "the record holds the hash of the start and says that the code changed meanwhile",
    ),
    Row(
        24,
        "input changed while it is tokenized",
        "appended to, replaced, removed during the work",
        "noticed by size or hash; nothing is committed",
    ),
    Row(
        25,
        "unusable input: no permission, bad UTF-8, broken gzip, half a Parquet file",
        "made on purpose",
        "the error names file and byte or row; what is skipped is allowed by the recipe, counted and listed",
    ),
    Row(
        26,
        "slow or flaky store: errors, latency, short reads",
        "a wrapped fsspec store",
        "a bounded number of retries, the same bytes, no busy loop",
    ),
    Row(
        27,
        "store without atomic rename, or with late listings",
        "a wrapped fsspec store",
        "the record decides; nothing relies on a listing",
    ),
    Row(
        28,
        "restored on another mesh (8 to 4 to 2 devices)",
        "forced host devices",
        "the same parameters to the bit; the next losses equal within a stated tolerance",
    ),
    Row(
        29,
        ".snakemake deleted or truncated",
        "removed, emptied, filled with garbage",
        "nothing runs again and nothing is trusted wrongly",
    ),
    Row(
        30,
        "garbage collection beside readers and builders",
        "a loop",
        "never deletes what a live lease or a record reaches; the dry run says what the real run does",
    ),
    Row(
        31,
        "the tracker is down, or the disk of its log is full",
        "no network; a full tmpfs",
        "training goes on and says so once; what was not sent can be sent later",
    ),
    Row(
        32,
        "few file descriptors, 10,000 shards, long and foreign names",
        "ulimit -n 64; paths of 4,000 bytes; Unicode",
        "works, or a clear error before any work",
    ),
    Row(
        33,
        "records of an old or a future schema",
        "records written by hand",
        "old ones load, unknown fields do no harm, future schemas are refused with the version that wrote them",
    ),
    Row(
        34,
        "power cut",
        "the file system as it would be had only synced bytes and names survived",
        "as for 1; files and folders are synced before the record",
    ),
)

BY_NUMBER = {row.number: row for row in ROWS}
