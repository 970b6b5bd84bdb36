# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arrays and buffers that are not what a session takes: each is refused by one of our errors, which says what to do."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Iterator

X = np.ones((2, 1, 8, 8), np.float32)


@pytest.fixture(params=["onnxruntime", "null"])
def session(request: pytest.FixtureRequest) -> Iterator[xrt.InferenceSession]:
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine=request.param) as opened:
        yield opened


def test_a_mask_is_not_dropped_silently(session: xrt.InferenceSession) -> None:
    with pytest.raises(xrt.InputError, match="masked array"):
        session.run({"image": np.ma.masked_array(X, X > 0)})


def test_objects_are_not_called_strings(session: xrt.InferenceSession) -> None:
    with pytest.raises(xrt.InputError, match="has dtype object, the model expects float32"):
        session.run({"image": X.astype(object)})


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        ((-2, 1, 8, 8), xrt.InputError, "a size is 0 or more"),
        ((2.0, 1, 8, 8), xrt.InputError, "shape or array"),
        ((10**9, 1, 8, 8), xrt.OutOfMemoryError, "no host memory for 'image'"),
        ((2**62, 1, 8, 8), xrt.OutOfMemoryError, "no host memory for 'image'"),
    ],
)
def test_a_shape_that_cannot_be_bound(
    session: xrt.InferenceSession, shape: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        session.bind({"image": shape})
    binding = session.bind({"image": tuple(np.int64(size) for size in X.shape)})
    binding.run()
    assert binding.outputs["logits"].shape == (2, 10)


def test_a_copy_without_room_is_out_of_memory_and_the_session_works_after(session: xrt.InferenceSession) -> None:
    huge = np.broadcast_to(np.zeros((1, 1, 8, 8), np.float32), (10**12, 1, 8, 8))
    with pytest.raises(MemoryError) as caught:
        session.run({"image": huge})
    assert isinstance(caught.value, xrt.OutOfMemoryError)
    assert session.run({"image": X})["logits"].shape == (2, 10)


def test_a_closed_binding_says_so(session: xrt.InferenceSession) -> None:
    binding = session.bind({"image": X})
    binding.close()
    binding.close()
    with pytest.raises(xrt.XpuRuntimeError, match="this binding is closed"):
        binding.run()
    assert session.run({"image": X})


def test_an_output_buffer_that_is_no_array_is_named_as_an_output() -> None:
    with (
        xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session,
        pytest.raises(xrt.InputError, match="output 'logits' is given as a tuple"),
    ):
        session.bind({"image": X}, {"logits": (2, 10)})


def test_a_session_says_that_it_cannot_be_pickled(session: xrt.InferenceSession) -> None:
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            call(session)  # type: ignore[operator]
