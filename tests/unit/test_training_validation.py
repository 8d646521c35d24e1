"""Validation: exact sums, the means that follow from them, and what cannot be scored."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_build.data.loader import Batch
from marin_build.errors import DamageError, NumericalError, RequestError
from marin_build.training.validation import Score, Validator, parents, score_metrics, target_bytes

MESH = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
BYTE_LENGTHS = np.array([0, 1, 2, 5])


def batch(tokens, mask):
    return Batch(np.array(tokens, np.int32), None, np.array(mask, bool))


ONE = [batch([[3, 1, 2], [0, 0, 1]], [[True, True], [True, False]])]
"""Targets 1, 2 and 0: 3 tokens of 1 + 2 + 0 bytes."""
TWO = [batch([[0, 3, 3], [3, 3, 0]], [[True, True], [True, True]])] * 2
"""Targets 3, 3, 3 and 0, twice: 8 tokens of 30 bytes."""


def a_nat_a_target(parameters, batch):
    return jnp.sum(batch["mask"] * parameters)


def validator(loaders, step=a_nat_a_target, stop_requested=lambda: False):
    return Validator(loaders, step, BYTE_LENGTHS, batch_size=2, mesh=MESH, stop_requested=stop_requested)


def test_sums_cover_every_batch_and_masked_targets_count_nowhere():
    metrics = validator({"one": ONE, "two": TWO}).validate(jnp.float32(2.0))
    assert metrics["eval/one/loss"] == 2.0
    assert metrics["eval/one/bpb"] == pytest.approx(6 / math.log(2) / 3)
    assert metrics["eval/two/bpb"] == pytest.approx(16 / math.log(2) / 30)
    assert metrics["eval/bpb"] == pytest.approx(22 / math.log(2) / 33)


def test_special_tokens_have_no_bytes():
    assert [target_bytes(part, BYTE_LENGTHS) for part in (ONE[0], TWO[0])] == [3, 15]


def test_micro_means_weigh_tokens_and_bytes_and_macro_means_weigh_sets():
    scores = {"a": Score(30.0, 10, 20), "b": Score(10.0, 10, 80)}
    metrics = score_metrics(scores)
    assert metrics["eval/loss"] == 2.0
    assert metrics["eval/macro_loss"] == 2.0
    assert metrics["eval/bpb"] == pytest.approx(40 / math.log(2) / 100)
    assert metrics["eval/macro_bpb"] == pytest.approx((30 / 20 + 10 / 80) / 2 / math.log(2))


def test_a_folder_of_sets_has_its_own_means_at_every_depth():
    scores = {"paloma/c4/en": Score(8.0, 4, 8), "paloma/ptb": Score(2.0, 2, 2), "other": Score(9.0, 1, 1)}
    metrics = score_metrics(scores)
    assert parents(scores) == ["paloma", "paloma/c4"]
    assert metrics["eval/paloma/micro_loss"] == pytest.approx(10 / 6)
    assert metrics["eval/paloma/macro_loss"] == pytest.approx((2.0 + 1.0) / 2)
    assert metrics["eval/paloma/bpb"] == pytest.approx(10 / math.log(2) / 10)
    assert metrics["eval/paloma/c4/macro_loss"] == 2.0
    assert metrics["eval/macro_loss"] == pytest.approx((2.0 + 1.0 + 9.0) / 3)
    assert "eval/other/macro_loss" not in metrics


def test_a_set_that_is_also_a_folder_of_sets_is_refused():
    with pytest.raises(RequestError, match="'paloma' is a set and also the folder of others"):
        parents({"paloma": 0, "paloma/ptb": 0})


def test_a_set_without_text_is_refused():
    with pytest.raises(RequestError, match="void has no bytes of text"):
        validator({"void": [batch([[1, 0, 0]] * 2, [[True, True]] * 2)]}).validate(jnp.float32(1.0))


def test_a_loss_that_is_not_a_number_stops_and_names_the_set():
    with pytest.raises(NumericalError, match="the validation loss of one is nan"):
        validator({"one": ONE}).validate(jnp.float32(math.nan))


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(DamageError, match="id 4 is outside the vocabulary of 4 ids: validation set one"):
        validator({"one": [batch([[1, 4, 1]] * 2, [[True, True]] * 2)]}).validate(jnp.float32(1.0))


def test_a_requested_stop_ends_validation_without_half_a_result():
    assert validator({"one": ONE, "two": TWO}, stop_requested=lambda: True).validate(jnp.float32(1.0)) is None
