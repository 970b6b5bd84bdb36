# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inputs of a search: batches of what is given, in order, and refusals of what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.model.shapes import with_shapes
from xpuruntime.errors import InputError
from xpuruntime.policies import Policy
from xpuruntime.testing import models
from xpuruntime.tuning.context import read_samples


@pytest.fixture
def open_batch(tmp_path):
    return inspect_model(models.save(models.mlp(), tmp_path))


@pytest.fixture
def fixed_batch(open_batch):
    return with_shapes(open_batch, Policy.coerce({"execution": {"shapes": {"x": [4, 64]}}}))


def rows(count):
    return np.arange(count * 64, dtype=np.float32).reshape(count, 64)


def test_samples_are_joined_into_batches_in_order(open_batch):
    samples = read_samples(rows(11), open_batch, batch=4, seed=0)
    assert [feed["x"].shape for feed in samples.feeds] == [(4, 64), (4, 64)]
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in samples.feeds]), rows(8))
    assert samples.note is None


@pytest.mark.parametrize("batch", [1, 2])
def test_what_no_batch_needs_is_counted_and_not_kept(open_batch, batch):
    samples = read_samples(rows(200 * batch), open_batch, batch=batch, seed=0)
    assert len(samples.feeds) == 64
    assert samples.note == "of 200 inputs, the first 64 were used"
    np.testing.assert_array_equal(samples.feeds[-1]["x"], rows(64 * batch)[-batch:])


def test_a_model_that_fixes_the_batch_takes_samples_of_it(fixed_batch):
    samples = read_samples([{"x": rows(4)}, {"x": rows(4) + 1}], fixed_batch, batch=4, seed=0)
    assert [feed["x"].shape for feed in samples.feeds] == [(4, 64), (4, 64)]
    with pytest.raises(InputError, match="a batch of 2 is asked for, and the model has no open batch"):
        read_samples([{"x": rows(4)}], fixed_batch, batch=2, seed=0)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (None, "a search needs inputs"),
        (7, "inputs: takes no int"),
        ("no/such/file.npz", "inputs: there is no file or folder"),
        ([], "inputs: a list of 0 holds no samples"),
        ([{"x": rows(1)}, {"y": rows(1)}], r"inputs: sample 1 \("),
    ],
)
def test_refusals_name_the_inputs(open_batch, data, match):
    with pytest.raises(InputError, match=match):
        read_samples(data, open_batch, batch=1, seed=0)


def test_fewer_rows_than_a_batch_are_refused(open_batch):
    with pytest.raises(InputError, match="has 3 rows, and a batch of 4 is asked for"):
        read_samples(rows(3), open_batch, batch=4, seed=0)
