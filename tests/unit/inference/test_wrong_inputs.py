# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inputs that are no mapping of arrays are refused as `InputError` by every engine and every call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Iterator

X = np.ones((1, 1, 8, 8), np.float32)


@pytest.fixture(scope="module", params=["onnxruntime", "openvino", "null", "torch"])
def session(request: pytest.FixtureRequest) -> Iterator[xrt.InferenceSession]:
    if request.param == "torch":
        torch = pytest.importorskip("torch", reason="needs PyTorch")
        examples = {"input": torch.ones(1, 1, 8, 8)}
        with xrt.InferenceSession(torch.nn.Conv2d(1, 2, 3).eval(), device="cpu", example_inputs=examples) as opened:
            yield opened
        return
    if request.param == "openvino":
        pytest.importorskip("openvino", reason="needs OpenVINO")
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine=request.param) as opened:
        yield opened


class Raising:
    """Answers every question with an error of its own."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


class Parcel:
    """Speaks DLPack, except where it says where it is."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __dlpack__(self, **_: Any) -> Any:
        return X.__dlpack__()

    def __dlpack_device__(self) -> Any:
        if isinstance(self.device, Exception):
            raise self.device
        return self.device


NO_MAPPINGS = (X, X[0, 0, 0, 0], np.ones((2, 1, 8, 8), np.float32), [X], (X,), "image", 3, {1, 2}, object(), iter([]))
NO_ARRAYS = (None, "x", 3, [1.0], [[1], [1, 2]], object(), np.float32, xrt.Policy(), xrt, Raising(), np.ma.ones(3))
DEVICES = (None, (), (1,), ("a", "b"), (2**40, 0), 3, (1, 0, 0), (-1, -1), ZeroDivisionError("no"))


@pytest.mark.parametrize("given", NO_MAPPINGS, ids=lambda one: type(one).__name__)
def test_what_is_no_mapping(session: xrt.InferenceSession, given: Any) -> None:
    name = session.inputs[0].name
    good = np.ones((1, 1, 8, 8), np.float32)
    first = session.run({name: good})  # the short way is open from here on
    for call in (
        session.run,
        session.bind,
        lambda one: session.run_async(one).result(),
        session.explain,
        lambda one: session.intermediates(one, ["x"]),
        lambda one: session.bind({name: good}, one),
    ):
        with pytest.raises(xrt.InputError):
            call(given)
    with pytest.raises(xrt.InputError, match=r"must be a dict of name to array, got \w+. Fix: pass \{'\w+': array\}"):
        session.run(given)
    again = session.run({name: good})
    assert all(np.array_equal(again[key], first[key]) for key in first)


@pytest.mark.parametrize("given", NO_ARRAYS, ids=lambda one: type(one).__name__)
def test_what_is_no_array(session: xrt.InferenceSession, given: Any) -> None:
    name = session.inputs[0].name
    for feeds in ({name: given}, {name: X, "other": given}, {given if given.__hash__ else 1: X}):
        with pytest.raises(xrt.InputError):
            session.run(feeds)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_what_does_not_say_where_it_is(session: xrt.InferenceSession, device: Any) -> None:
    name = session.inputs[0].name
    with pytest.raises(xrt.InputError, match=name):
        session.run({name: Parcel(device)})
    with pytest.raises(xrt.InputError):
        session.run_async({name: Parcel(device)}).result()


@pytest.mark.parametrize("device", [*DEVICES, (1, 2**80), [1, 0]], ids=str)
def test_tensors_and_operations(device: Any) -> None:
    expected = ZeroDivisionError if isinstance(device, Exception) else xrt.XpuRuntimeError
    with pytest.raises(expected):  # what the producer itself raises is the producer's
        xrt.Tensor.from_dlpack(Parcel(device))
    with pytest.raises(xrt.XpuRuntimeError):
        xrt.ops.matmul(Parcel(device), Parcel(device))
