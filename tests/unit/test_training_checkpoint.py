"""Checkpoints: what is saved comes back bit for bit, what is damaged is noticed, and no step is lost unasked."""

import logging
import os
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_build.errors import DamageError, DriftError, LeasedError, MarinError
from marin_build.training.checkpoint import MANIFEST, Checkpoints, load_state
from marin_build.training.state import TrainState, state_digest

IDENTITY = {"fingerprint": "a" * 32, "plan": "b" * 32}


def state(value: float) -> TrainState:
    parameters = {"embedding": jnp.full((8, 4), value), "final_norm": {"scale": jnp.arange(4.0) + value}}
    return TrainState(parameters, (jnp.int32(value), {"mu": jax.tree.map(lambda p: p / 3, parameters)}))


PLACED = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))


def checkpoints(folder, *, keep=10, identity=IDENTITY, check_lease=lambda: None, bring=lambda *_: None) -> Checkpoints:
    return Checkpoints(
        folder,
        identity=identity,
        is_kept=lambda step: step % keep == 0,
        check_lease=check_lease,
        keep=bring,
        logger=logging.getLogger("test"),
    )


def save(folder, *steps, **options) -> Checkpoints:
    with checkpoints(folder, **options) as saved:
        for step in steps:
            saved.save(step, state(step), {"seconds": step / 2})
    return saved


def restore(folder, **options):
    with checkpoints(folder, **options) as saved:
        return saved.restore(PLACED)


def flip_a_bit(folder, step):
    """In the largest file of a checkpoint: the tensors."""
    files = [path for path in (folder / str(step)).rglob("*") if path.is_file() and path.name != MANIFEST]
    flip(max(files, key=lambda path: path.stat().st_size))


def test_nothing_is_restored_where_nothing_was_saved(tmp_path):
    assert restore(tmp_path) is None


def test_the_newest_state_comes_back_bit_for_bit_with_its_notes(tmp_path):
    save(tmp_path, 5, 10)
    found = restore(tmp_path)
    assert (found.step, found.notes, found.problems) == (10, {"seconds": 5.0}, ())
    assert state_digest(found.state) == state_digest(state(10))
    jax.tree.map(np.testing.assert_array_equal, found.state, state(10))


@pytest.mark.row(15)
@pytest.mark.row(16)
def test_the_newest_state_is_that_of_the_highest_step_whatever_the_times_say(tmp_path):
    save(tmp_path, 10, 20, 100)
    for age, step in enumerate((100, 20, 10)):
        for path in (*(tmp_path / str(step)).rglob("*"), tmp_path / str(step)):
            os.utime(path, (10**9 + age, 10**9 + age))
    assert restore(tmp_path).step == 100


def test_a_rolling_checkpoint_goes_when_a_newer_one_is_committed_and_a_kept_one_stays(tmp_path):
    saved = save(tmp_path, 5, 10, 15, 17)
    assert saved.steps() == [10, 17]
    assert saved.not_kept() == ("17/",)


def test_each_committed_step_is_brought_to_the_store_and_what_goes_is_let_go(tmp_path):
    brought = []

    def bring(names, dropped):
        assert all((tmp_path / name / MANIFEST).is_file() for name in names), "only what is committed"
        brought.append((names, dropped))

    save(tmp_path, 5, 10, 15, 17, bring=bring)
    assert brought == [(["5"], []), (["10"], ["5"]), (["15"], []), (["17"], ["15"])]


def test_at_the_end_only_kept_checkpoints_stay(tmp_path):
    saved = save(tmp_path, 10, 17)
    (tmp_path / "damaged-12").mkdir()
    saved.remove_not_kept()
    assert os.listdir(tmp_path) == ["10"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.row(21)
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_any_damage_in_any_file_is_noticed_and_the_checkpoint_before_it_is_taken(tmp_path, caplog, damage):
    save(tmp_path / "whole", 10, 20)
    newest = tmp_path / "whole" / "20"
    names = [path.relative_to(newest) for path in newest.rglob("*") if path.is_file()]
    assert {"_METADATA", "manifest.ocdbt", MANIFEST} <= {name.name for name in names}
    if damage == Path.unlink:
        names.remove(Path(MANIFEST))  # without it the digest of the state decides, as after a crash before it
    for number, name in enumerate(names):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / f"{number}")
        damage(folder / "20" / name)
        caplog.clear()
        found = restore(folder)
        assert found.step == 10, name
        assert state_digest(found.state) == state_digest(state(10))
        assert len(found.problems) == 1
        assert found.problems[0].startswith("step 20: "), name
        assert "FALLING BACK to the one of step 10" in caplog.text
        assert sorted(os.listdir(folder)) == ["10", "damaged-20"], name


def test_after_falling_back_the_damaged_step_can_be_saved_again(tmp_path):
    save(tmp_path, 10, 20)
    flip_a_bit(tmp_path, 20)
    with checkpoints(tmp_path) as saved:
        saved.restore(PLACED)
        saved.save(20, state(20), {})
    assert restore(tmp_path).step == 20


def test_when_no_committed_checkpoint_is_whole_the_run_stops_and_nothing_is_touched(tmp_path):
    save(tmp_path, 10, 20)
    flip_a_bit(tmp_path, 10)
    shutil.rmtree(tmp_path / "20" / "parameters")
    with pytest.raises(DamageError, match=r"no checkpoint in .* is whole(.|\n)*step 20(.|\n)*step 10(.|\n)*-f"):
        restore(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["10", "20"]


def test_a_save_whose_manifest_a_crash_prevented_counts_if_its_state_is_whole(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "10" / MANIFEST).unlink()
    found = restore(tmp_path)
    assert found.step == 10
    assert state_digest(found.state) == state_digest(state(10))


def test_a_whole_state_without_a_manifest_gets_one_and_passes_the_final_check(tmp_path):
    save(tmp_path, 10, 20)
    for step in (10, 20):
        (tmp_path / str(step) / MANIFEST).unlink()
    with checkpoints(tmp_path) as saved:
        found = saved.restore(PLACED)
        assert found.step == 20
        saved.check(20, found.state)
        assert saved.set_damaged_aside(20, found.state) == ()
    assert all((tmp_path / step / MANIFEST).is_file() for step in ("10", "20"))


def test_no_record_vouches_for_a_kept_step_that_was_damaged_after_it_was_saved(tmp_path, caplog):
    save(tmp_path, 10, 20, 30)
    flip_a_bit(tmp_path, 10)
    with checkpoints(tmp_path) as saved:
        (problem,) = saved.set_damaged_aside(30, saved.restore(PLACED).state)
        assert problem.startswith("step 10: ")
        assert "checkpoint of step 10 is not whole and is dropped" in caplog.text
        assert saved.steps() == [20, 30]
        assert saved.not_kept() == ("damaged-10/",)


@pytest.mark.parametrize("cut", ["tensors", "folder"])
def test_a_save_that_was_never_committed_and_is_not_whole_is_no_reason_to_stop(tmp_path, caplog, cut):
    save(tmp_path, 10)
    (tmp_path / "10" / MANIFEST).unlink()
    if cut == "tensors":
        flip_a_bit(tmp_path, 10)
    else:
        shutil.rmtree(tmp_path / "10" / "optimizer")
    assert restore(tmp_path) is None
    assert "FALLING BACK to the start: none was ever committed" in caplog.text


def test_a_flipped_bit_that_orbax_loads_without_a_word_is_noticed(tmp_path, caplog):
    noise = {"embedding": jax.random.normal(jax.random.key(0), (128, 128))}
    with checkpoints(tmp_path) as saved:
        saved.save(10, TrainState(noise, noise), {})
    (tmp_path / "10" / MANIFEST).unlink()
    flip_a_bit(tmp_path, 10)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), TrainState(noise, noise)
    )
    load_state(tmp_path / "10", placed)
    with checkpoints(tmp_path) as saved:
        assert saved.restore(placed) is None
    assert "the state read back is not the state that was saved" in caplog.text


def test_a_removal_cut_short_by_a_crash_is_finished_and_never_read(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "going-5").mkdir()
    assert restore(tmp_path).step == 10
    assert os.listdir(tmp_path) == ["10"]


def test_an_unfinished_save_is_removed_by_the_next_one(tmp_path):
    save(tmp_path, 10)
    shutil.copytree(tmp_path / "10", tmp_path / "20.orbax-checkpoint-tmp")
    assert restore(tmp_path).step == 10
    save(tmp_path, 20)
    assert sorted(os.listdir(tmp_path)) == ["10", "20"]


def test_a_state_of_other_data_is_refused(tmp_path):
    save(tmp_path, 10)
    with pytest.raises(DriftError, match=r"belongs to another training \(plan changed\)"):
        restore(tmp_path, identity={**IDENTITY, "plan": "c" * 32})


def test_nothing_is_committed_once_the_lease_is_lost(tmp_path):
    lost = False

    def check_lease():
        if lost:
            raise LeasedError("somebody else builds this")

    with checkpoints(tmp_path, check_lease=check_lease) as saved:
        saved.save(10, state(10), {})
        saved.wait()
        lost = True
        with pytest.raises(LeasedError):
            saved.save(20, state(20), {})
    assert saved.steps() == [10]


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
    add = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    digests = {}
    with checkpoints(tmp_path, keep=1) as saved:
        current = state(0)
        for step in range(1, 5):
            saved.save(step, current, {})
            digests[step] = state_digest(current)
            current = add(current)
    for step in (4, 3, 2, 1):
        assert state_digest(restore(tmp_path, keep=1).state) == digests[step]
        shutil.rmtree(tmp_path / str(step))


def test_the_final_check_reads_every_byte_back(tmp_path):
    with checkpoints(tmp_path) as saved:
        saved.save(10, state(10), {})
        saved.wait()
        saved.check(10, state(10))
        flip_a_bit(tmp_path, 10)
        with pytest.raises(DamageError, match="has other bytes than were written"):
            saved.check(10, state(10))


def test_a_save_that_fails_in_the_background_is_raised_with_one_clear_line_and_leaves_the_one_before(tmp_path):
    save(tmp_path, 9)
    large = {"embedding": jax.random.normal(jax.random.key(0), (256, 256))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with checkpoints(tmp_path) as saved:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            saved.save(11, TrainState(large, large), {})
            with pytest.raises(MarinError, match=r"the checkpoint of step 11 could not be saved") as raised:
                saved.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in str(raised.value)
    assert restore(tmp_path).step == 9
