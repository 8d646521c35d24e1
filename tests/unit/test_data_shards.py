"""Shards as Arrow files, and folders of them."""

from __future__ import annotations

import json
import os

import numpy as np
import pyarrow
import pytest
import xxhash

from marin_build.data.shards import Shard, TokenizedSet, id_type, write_shard
from marin_build.errors import DamageError, RequestError


def some(count: int = 7, type: type = np.int32) -> tuple[np.ndarray, np.ndarray]:
    """ids and lengths of some documents, one of them empty."""
    lengths = np.array([3, 0, 4] * count)[:count]
    return np.arange(lengths.sum(), dtype=type), lengths


@pytest.mark.parametrize("type", [np.uint16, np.int32])
def test_a_shard_gives_back_its_ids_and_offsets_without_copying(tmp_path, type):
    ids, lengths = some(type=type)
    write_shard(tmp_path / "a.arrow", ids, lengths)
    shard = Shard(tmp_path / "a.arrow", len(ids), len(lengths))
    before = pyarrow.total_allocated_bytes()
    assert shard.ids.dtype == type
    assert shard.ids.tolist() == ids.tolist()
    assert shard.offsets.tolist() == [0, *np.cumsum(lengths)]
    assert pyarrow.total_allocated_bytes() == before
    assert not shard.ids.flags.writeable
    with open("/proc/self/maps") as maps:
        assert str(tmp_path / "a.arrow") in maps.read()


def test_equal_documents_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        write_shard(tmp_path / name, *some())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_shard_without_documents_can_be_read(tmp_path):
    write_shard(tmp_path / "a.arrow", np.empty(0, np.uint16), np.empty(0, np.int64))
    shard = Shard(tmp_path / "a.arrow", 0, 0)
    assert (shard.ids.tolist(), shard.offsets.tolist()) == ([], [0])


def test_wrong_types_and_lengths_are_our_own_mistakes(tmp_path):
    with pytest.raises(ValueError, match="do not fit"):
        write_shard(tmp_path / "a", np.arange(3), np.array([3]))
    with pytest.raises(ValueError, match="do not fit"):
        write_shard(tmp_path / "a", np.arange(3, dtype=np.int32), np.array([2]))


def test_a_loss_mask_is_a_second_column_and_text_has_none(tmp_path):
    ids, lengths = some()
    mask = (ids % 3 == 0).astype(np.uint8)
    write_shard(tmp_path / "plain.arrow", ids, lengths)
    write_shard(tmp_path / "chat.arrow", ids, lengths, mask)
    shard = Shard(tmp_path / "chat.arrow", len(ids), len(lengths))
    assert shard.ids.tolist() == ids.tolist()
    assert shard.loss_mask is not None
    assert (shard.loss_mask.dtype, shard.loss_mask.tolist()) == (np.uint8, mask.tolist())
    assert Shard(tmp_path / "plain.arrow", len(ids), len(lengths)).loss_mask is None
    with pytest.raises(ValueError, match=r"loss mask uint8 \(16,\) does not fit ids"):
        write_shard(tmp_path / "a", ids, lengths, mask[1:])
    with pytest.raises(ValueError, match="loss mask bool"):
        write_shard(tmp_path / "a", ids, lengths, mask.astype(bool))


def test_a_shard_of_text_has_the_bytes_that_it_always_had(tmp_path):
    write_shard(tmp_path / "a.arrow", *some())
    assert xxhash.xxh3_128_hexdigest((tmp_path / "a.arrow").read_bytes()) == "a8bcb790007bf24a9887e7d5c8b1f9d3"


def test_ids_are_16_bits_wide_as_long_as_the_vocabulary_allows():
    assert id_type(65_536) == np.uint16
    assert id_type(65_537) == np.int32


def test_many_open_shards_hold_no_descriptors(tmp_path):
    write_shard(tmp_path / "a.arrow", *some())
    before = len(os.listdir("/proc/self/fd"))
    shards = [Shard(tmp_path / "a.arrow", len(some()[0]), 7) for _ in range(50)]
    assert sum(int(shard.ids[0]) for shard in shards) == 0
    assert len(os.listdir("/proc/self/fd")) == before


# ---- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def token_folder(workbench):
    data = "".join(json.dumps({"text": f"document {number}" * 20}) + "\n" for number in range(40)).encode()
    raw = workbench.raw({"a.jsonl": data, "b.jsonl": data})
    folder, _ = workbench.tokenize(raw, workbench.bytes_tokenizer(), shard_bytes=2000, add_bos=True)
    return folder


def test_a_set_has_its_shards_in_order_and_the_totals_of_its_ledger(token_folder):
    opened = TokenizedSet.open(token_folder)
    assert opened.documents == 80
    assert opened.tokens == sum(len(shard.ids) for shard in opened.shards)
    assert opened.vocab_size == 258
    assert [shard.path.name for shard in opened.shards] == sorted(path.name for path in token_folder.glob("*.arrow"))
    for shard in opened.shards:
        assert (shard.ids[shard.offsets[:-1]] == 256).all()
        assert (shard.ids[shard.offsets[1:] - 1] == 257).all()


def test_huggingface_datasets_opens_the_folder_and_each_shard(token_folder):
    from datasets import Dataset, load_from_disk

    opened = TokenizedSet.open(token_folder)
    whole = load_from_disk(str(token_folder))
    assert whole.num_rows == 80
    assert whole.features["input_ids"].feature.dtype == "uint16"
    assert [i for ids in whole["input_ids"] for i in ids] == [i for shard in opened.shards for i in shard.ids.tolist()]
    one = Dataset.from_file(str(opened.shards[1].path))
    assert one[0]["input_ids"] == opened.shards[1].ids[: opened.shards[1].offsets[1]].tolist()


def test_huggingface_datasets_opens_wide_ids_and_empty_shards(workbench, tmp_path):
    from datasets import load_from_disk

    from marin_build.data.ledger import _write_datasets_files

    write_shard(tmp_path / "a-00000.arrow", *some(0))
    write_shard(tmp_path / "b-00000.arrow", *some(7))
    shards = [{"file": "a-00000.arrow"}, {"file": "b-00000.arrow"}]
    _write_datasets_files(tmp_path, {"shards": shards, "content_digest": "0" * 32}, 128_256)
    whole = load_from_disk(str(tmp_path))
    assert whole.num_rows == 7
    assert whole.features["input_ids"].feature.dtype == "int32"


def test_a_truncated_or_missing_shard_is_damage_that_names_it(token_folder):
    first, *_ = sorted(token_folder.glob("*.arrow"))
    size = first.stat().st_size
    os.truncate(first, size - 8)
    with pytest.raises(DamageError, match=rf"{first.name} has {size - 8:,} bytes instead of {size:,}"):
        TokenizedSet.open(token_folder)
    first.unlink()
    with pytest.raises(DamageError, match=f"{first.name} is missing"):
        TokenizedSet.open(token_folder)


def test_a_shard_of_the_right_size_and_wrong_content_is_damage(token_folder):
    first, *_ = sorted(token_folder.glob("*.arrow"))
    size = first.stat().st_size
    first.write_bytes(bytes(size))
    with pytest.raises(DamageError, match=f"{first.name} cannot be read"):
        TokenizedSet.open(token_folder).shards[0].ids  # noqa: B018
    ids, lengths = some()
    write_shard(first, ids, lengths)
    first.write_bytes(first.read_bytes() + bytes(size - first.stat().st_size))
    with pytest.raises(DamageError, match="holds 17 ids in 7 documents, its ledger says"):
        TokenizedSet.open(token_folder).shards[0].ids  # noqa: B018


def test_a_folder_without_ledger_is_not_finished(token_folder):
    (token_folder / "ledger.json").unlink()
    with pytest.raises(DamageError, match=r"ledger.json cannot be read: No such file .*not finished or damaged"):
        TokenizedSet.open(token_folder)


def test_a_ledger_of_a_newer_format_is_refused(token_folder):
    ledger = json.loads((token_folder / "ledger.json").read_text())
    (token_folder / "ledger.json").write_text(json.dumps({**ledger, "format": 3}))
    with pytest.raises(RequestError, match="has format 3, this marin_build reads up to 2"):
        TokenizedSet.open(token_folder)
    (token_folder / "ledger.json").write_text("{")
    with pytest.raises(DamageError, match=r"ledger.json is damaged"):
        TokenizedSet.open(token_folder)
