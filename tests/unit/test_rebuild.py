"""`verify --rebuild`: what is made again is compared to the bit; what is forged together with its record is found."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
from compiled import compiled_once
from llamas import llama_yaml

from marin_build.artifact.digest import file_entry, root_digest
from marin_build.artifact.pool import pool_key
from marin_build.artifact.record import read_record, write_record
from marin_build.artifact.store import open_store
from marin_build.cli import main
from marin_build.recipe.target import parse_target

RAW, TOKENIZER = "raw/notes/2026.01.01", "tokenizers/bytes/2026.01.01"
TOKENS, MODEL = "tokenized/notes/2026.01.01", "checkpoints/tiny/2026.01.01"
RECIPES = {
    RAW: "source: {type: files, paths: [texts/*], digest: unresolved}\n",
    TOKENIZER: "tokenizer:\n  method: bytes\n  special_tokens: {bos: <|bos|>, eos: <|eos|>, pad: null}\n",
    TOKENS: f"""
tokenizer: {TOKENIZER}
source: {{type: artifact, target: {RAW}, files: ["*"]}}
format: {{type: jsonl, text_key: text}}
add_bos: true
add_eos: true
shard_bytes: 3000
token_budget: null
max_bad_documents: 0
""",
    MODEL: f"""
data:
  tokenizer: {TOKENIZER}
  train: {{notes: {{target: {TOKENS}, weight: 1}}}}
  sequence_length: 16
  mixture_block: 1
  attention_across_documents: true
{llama_yaml(258)}
steps: 12
global_batch_size: 2
measure: {{keep_every_steps: 4}}
""",
}
SETTINGS = ["--config", "wandb=disabled", "log_every_steps=2", "compilation_cache=null"]


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """Three files of text, two of them in several shards, and a training of 12 steps on them."""
    folder = tmp_path_factory.mktemp("rebuild")
    lines = [json.dumps({"text": f"{number} whales sing to {number + 1} ships"}) + "\n" for number in range(200)]
    (folder / "texts").mkdir()
    (folder / "texts/a.jsonl").write_text("".join(lines))
    (folder / "texts/b.jsonl.gz").write_bytes(gzip.compress("".join(lines[::-1]).encode()))
    (folder / "texts/c.jsonl").write_text(lines[0])
    for target, text in RECIPES.items():
        path = folder / f"config/{target}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.MonkeyPatch.context() as patch, compiled_once(tmp_path_factory.mktemp("compiled")):
        patch.chdir(folder)
        patch.delenv("MARIN_PREFIX", raising=False)
        patch.setenv("GLIBC_TUNABLES", "")  # or the command would start itself anew
        assert main(["pin", RAW]) == 0
        for target in (RAW, TOKENIZER, TOKENS, MODEL):
            assert main(["build", target, *SETTINGS]) == 0
        yield folder


@pytest.fixture
def place(made_once, tmp_path, monkeypatch):
    """A copy that a test may spoil."""
    shutil.copytree(made_once, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def rebuild(target, count, seed=1):
    return main(["verify", "--rebuild", f"{count}", target, "--seed", f"{seed}", *SETTINGS])


def record_of(target):
    return read_record(open_store("artifacts"), parse_target(target))


def forge(target, *names, digest=None):
    """Make the record agree with files that were changed, as somebody does who can write to the prefix."""
    record, folder = record_of(target), Path("artifacts", target)
    changed = {name: file_entry(folder / name, below=folder) for name in names}
    files = tuple({**entry, **changed.get(entry["path"], {})} for entry in record.files)
    digest = digest or (record.digest if target == MODEL else root_digest(files))
    write_record(open_store("artifacts"), dataclasses.replace(record, files=files, digest=digest))


def contents(target):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in Path("artifacts", target).rglob("*")
        if path.is_file() and path.name != ".artifact.json"
    }


def flip(path, at=-9):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---- equal -----------------------------------------------------------------------------------------------------------


def test_shards_made_again_are_equal_and_the_record_gets_a_certificate(place, capsys):
    before, record = contents(TOKENS), record_of(TOKENS)
    assert rebuild(TOKENS, 3, seed=7) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(rf"{TOKENS}: made again: shards ([\w.-]+.arrow(, )?){{3}}, seed 7: equal to the bit\n", said)
    (certificate,) = record_of(TOKENS).certificates
    assert (certificate["kind"], certificate["what"], certificate["seed"]) == ("rebuild", "shards", 7)
    assert (certificate["equal"], certificate["difference"]) == ("equal to the bit", None)
    assert len(certificate["checked"]) == 3
    assert certificate["packages"]["tokenizers"]
    assert certificate["user"]
    assert dataclasses.replace(record_of(TOKENS), certificates=()) == record
    assert contents(TOKENS) == before
    assert sorted(os.listdir(f"artifacts/{TOKENS}")) == sorted(
        {path.relative_to(f"artifacts/{TOKENS}").parts[0] for path in before} | {".artifact.json"}
    )
    assert main(["show", TOKENS]) == 0
    assert "equal to the bit" in capsys.readouterr().out
    assert main(["status", TOKENS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["state"] == "finished"


def test_on_an_object_store_it_is_the_same(place, capsys, memory_prefix):
    prefix = f"memory://rebuild/{os.getpid()}"
    there = [*SETTINGS, f"prefix={prefix}", "object_cache=cache"]
    for target in (RAW, TOKENIZER, TOKENS):
        assert main(["build", target, *there]) == 0
    store, target = open_store(prefix, "cache"), parse_target(TOKENS)
    record, listing = read_record(store, target), store.listing(target)
    assert record.digest == record_of(TOKENS).digest
    assert main(["verify", "--rebuild", "3", TOKENS, "--seed", "7", *there]) == 0
    assert "equal to the bit" in capsys.readouterr().out
    (certificate,) = read_record(store, target).certificates
    assert (len(certificate["checked"]), certificate["equal"]) == (3, "equal to the bit")
    assert dataclasses.replace(read_record(store, target), certificates=()) == record
    after = store.listing(target)
    assert {**after, ".artifact.json": 0} == {**listing, ".artifact.json": 0}
    shard = next(entry for entry in record.files if entry["path"] == certificate["checked"][0])
    store.bucket.put(pool_key(shard), b"x" * shard["bytes"])
    shutil.rmtree("cache")
    assert main(["verify", "--rebuild", "3", TOKENS, "--seed", "7", *there]) == 4
    assert f"{TOKENS} is damaged" in capsys.readouterr().err
    assert len(read_record(store, target).certificates) == 1


def test_every_shard_of_every_file_comes_out_again(place):
    shards = len(list(Path("artifacts", TOKENS).glob("*.arrow")))
    assert shards > 5
    assert rebuild(TOKENS, 1000) == 0
    assert len(record_of(TOKENS).certificates[0]["checked"]) == shards


def test_the_seed_decides_which_and_is_drawn_and_told_where_none_is_given(place, capsys):
    assert main(["verify", "--rebuild", "2", TOKENS, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[TOKENS]
    rebuild(TOKENS, 2, first["seed"])
    assert record_of(TOKENS).certificates[1]["checked"] == first["checked"]
    choices = set()
    for seed in range(5):
        rebuild(TOKENS, 2, seed)
        choices.add(tuple(record_of(TOKENS).certificates[-1]["checked"]))
    assert len(choices) > 1


@pytest.mark.parametrize("target", [RAW, TOKENIZER])
def test_raw_text_and_tokenizers_are_made_again_as_a_whole(place, target):
    assert rebuild(target, 1) == 0
    (certificate,) = record_of(target).certificates
    content = {entry["path"] for entry in record_of(target).content}
    assert (certificate["what"], set(certificate["checked"])) == ("files", content)


def test_steps_made_again_reach_the_kept_states_to_the_bit(place, capsys):
    before = contents(MODEL)
    assert rebuild(MODEL, 4, seed=3) == 0
    assert rebuild(MODEL, 6, seed=1) == 0
    said = capsys.readouterr().out
    assert said.count("equal to the bit") == 2
    first, second = record_of(MODEL).certificates
    assert first["what"] == "steps"
    assert [int(step) for step in first["checked"]] in ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    assert len(second["checked"]) == 6
    assert contents(MODEL) == before


# ---- different -------------------------------------------------------------------------------------------------------


def test_a_forged_shard_is_found_and_noted_and_is_no_damage(place, capsys):
    path = next(Path("artifacts", TOKENS).glob("a.jsonl-00001.arrow"))
    whole = file_entry(path)["xxh3_128"]
    flip(path)
    forged = file_entry(path)["xxh3_128"]
    forge(TOKENS, path.name)
    assert main(["verify", "--full", TOKENS]) == 0
    assert rebuild(TOKENS, 1000) == 4
    said = capsys.readouterr().out.splitlines()[-1]
    assert f"{path.name} has xxh3_128 {whole} when made again and {forged} in the artifact" in said
    (certificate,) = record_of(TOKENS).certificates
    assert certificate["equal"] is None
    assert path.name in certificate["difference"]
    assert record_of(TOKENS).damage == ()


def test_a_damaged_shard_is_damage_and_nothing_is_certified(place, capsys):
    flip(next(Path("artifacts", TOKENS).glob("a.jsonl-00001.arrow")))
    assert rebuild(TOKENS, 1000) == 4
    assert "is damaged: a.jsonl-00001.arrow: other bytes" in capsys.readouterr().err
    assert record_of(TOKENS).certificates == ()


def test_damage_in_what_it_is_made_from_is_told_as_such(place, capsys):
    flip(next(Path("artifacts", RAW).glob("c.jsonl")), at=12)
    assert rebuild(TOKENS, 1000) == 4
    assert f"its dependency {RAW} is damaged: c.jsonl: other bytes" in capsys.readouterr().err
    assert record_of(TOKENS).certificates == ()


def test_a_forged_raw_file_is_found(place, capsys):
    path = Path("artifacts", RAW, "c.jsonl")
    path.write_text(path.read_text().replace("whales", "trains"))
    forge(RAW, "c.jsonl")
    assert rebuild(RAW, 1) == 4
    assert "c.jsonl has xxh3_128" in capsys.readouterr().out


def test_a_forged_line_of_metrics_is_found(place, capsys):
    path = Path("artifacts", MODEL, "metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    line = next(line for line in lines if line["step"] == 6)
    honest, line["train/loss"] = line["train/loss"], line["train/loss"] - 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    forge(MODEL, "metrics.jsonl")
    assert rebuild(MODEL, 12) == 4
    said = capsys.readouterr().out
    assert f"step 6: train/loss is {honest} when made again and {line['train/loss']} in the artifact" in said
    assert record_of(MODEL).certificates[0]["equal"] is None


def test_a_forged_final_state_is_found(place, capsys):
    honest = record_of(MODEL).digest
    forged = forge_final_state(1.0001)
    assert main(["verify", "--full", MODEL]) == 0
    assert rebuild(MODEL, 12) == 4
    said = capsys.readouterr().out
    assert f"step 12: digest of the state is {honest} when made again and {forged} in the artifact" in said


def forge_final_state(factor):
    """Multiply the parameters of the final state, save them properly and let the record agree; returns the digest."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as orbax

    from marin_build.training.checkpoint import Checkpoints, saved_with
    from marin_build.training.state import TrainState, state_digest

    folder = Path("artifacts", MODEL, "checkpoints").absolute()
    with_it = saved_with(folder / "12")
    tree = orbax.checkpointables_metadata(folder / "12").metadata
    like = {
        name: jax.tree.map(lambda x: np.empty(x.shape, x.dtype), tree[name]) for name in ("parameters", "optimizer")
    }
    loaded = orbax.load_checkpointables(folder / "12", like)
    state = TrainState(jax.tree.map(lambda x: x * np.float32(factor), loaded["parameters"]), loaded["optimizer"])
    with Checkpoints(
        folder.parent / "forged",
        identity=with_it["identity"],
        is_kept=lambda _: True,
        check_lease=lambda: None,
        logger=logging.getLogger("forger"),
    ) as checkpoints:
        checkpoints.save(12, state, with_it["notes"])
    shutil.rmtree(folder / "12")
    (folder.parent / "forged/12").rename(folder / "12")
    record, store = record_of(MODEL), open_store("artifacts")
    others = [entry for entry in record.files if not entry["path"].startswith("checkpoints/12/")]
    new = [file_entry(path, below=folder.parent) for path in (folder / "12").rglob("*") if path.is_file()]
    write_record(store, dataclasses.replace(record, files=(*others, *new), digest=state_digest(state)))
    return state_digest(state)


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_what_is_not_finished_or_drifted_or_gone_is_refused(place, capsys):
    path = Path("config", f"{TOKENS}.yaml")
    recipe = path.read_text()
    path.write_text(recipe.replace("add_bos: true", "add_bos: false"))
    assert rebuild(TOKENS, 1) == 3
    path.write_text(recipe)
    Path("artifacts", RAW, ".artifact.json").unlink()
    assert rebuild(TOKENS, 1) == 2
    assert f"its dependency {RAW} is not finished" in capsys.readouterr().err
    assert rebuild(RAW, 1) == 2
    assert "cannot be made again" in capsys.readouterr().err


def test_more_steps_than_there_are_is_refused_with_what_is_possible(place, capsys):
    assert rebuild(MODEL, 13) == 2
    assert "has 12 steps, kept 4, 8, 12: 13 steps cannot be made again and compared" in capsys.readouterr().err
    assert rebuild(MODEL, 1) == 2
    assert "try --rebuild 2" in capsys.readouterr().err


# ---- other devices ---------------------------------------------------------------------------------------------------


def judged(again, recorded, *, same, distance=0.0):
    from marin_build.training.replay import Compared, _judge

    return _judge(("5",), [Compared(5, "train/loss", again, recorded, distance)], same, tolerance=1e-3)


def test_under_other_conditions_numbers_agree_to_the_stated_tolerance():
    assert judged(2.0, 2.0, same=False).equal == "equal to the bit"
    told = "step 5: train/loss is 2.0 when made again and 2.0001 in the artifact"
    assert judged(2.0, 2.0001, same=True).difference == told
    near = judged(2.0, 2.0001, same=False, distance=5e-5)
    assert (near.difference, near.equal) == (None, "equal within 0.001: made on other devices or by another compiler")
    assert "not within 0.001" in judged(2.0, 2.1, same=False, distance=5e-2).difference
    assert judged(2.0, 2.1, same=False, distance=float("nan")).difference


def claim_other_devices(monkeypatch):
    """As if the training had been made elsewhere."""
    from marin_build.training import replay

    usual = replay.conditions
    monkeypatch.setattr(replay, "conditions", lambda *given: {**usual(*given), "device": "another"})


def test_a_training_of_other_devices_is_compared_within_the_tolerance(place, capsys, monkeypatch):
    claim_other_devices(monkeypatch)
    assert rebuild(MODEL, 12) == 0
    assert "equal to the bit" in capsys.readouterr().out, "the devices are the same after all"
    forge_final_state(1.0001)
    assert rebuild(MODEL, 12) == 0
    assert "equal within 0.001: made on other devices" in capsys.readouterr().out
    forge_final_state(1.1)
    assert rebuild(MODEL, 12) == 4
    assert "digest of the state is" in capsys.readouterr().out
