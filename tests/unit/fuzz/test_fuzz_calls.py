# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arrays, shapes, devices and DLPack capsules that make no sense, given to sessions, tensors and operations."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from fuzzing import NUMBERS, TEXTS, any_json, cases, expect_ours

import xpuruntime as xrt

if TYPE_CHECKING:
    import random

X = np.ones((1, 1, 8, 8), np.float32)


class Parcel:
    """Answers the questions of DLPack with what it was given."""

    def __init__(self, device: Any, capsule: Any) -> None:
        self.device = device
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return X.__dlpack__() if self.capsule is None else self.capsule

    def __dlpack_device__(self) -> Any:
        return self.device


def any_array(rng: random.Random) -> Any:
    """Return an array of any type, shape and layout, or no array."""
    kind = rng.randrange(8)
    if kind == 0:
        return any_json(rng)
    if kind == 1:
        device = rng.choice((None, (), (1, 0), (2, 0), (rng.choice(NUMBERS), rng.choice(NUMBERS)), "cpu", [1, 0]))
        return Parcel(device, rng.choice((None, None, 3, "x", object())))
    if kind == 2:
        return rng.choice((np.float32(1), ctypes.c_int(3), memoryview(b"12345678"), X.tobytes(), np.ma.ones(3), {1: X}))
    shape = [rng.choice((0, 1, 2, 8)) for _ in range(rng.randrange(6))]
    dtype = rng.choice(("f4", "f8", "f2", "i8", "u1", "?", "c8", "U3", "S2", "O", ">f4", "M8[s]", "V4"))
    array = np.zeros(shape, dtype)
    if rng.random() < 0.4 and array.ndim:
        array = array[..., ::-1] if rng.random() < 0.5 else array.T
    if rng.random() < 0.2:
        array.flags.writeable = False
    return array


def any_feeds(rng: random.Random) -> Any:
    """Return a mapping of names to arrays, or none."""
    if rng.random() < 0.2:
        return any_array(rng)
    names = ["image", rng.choice(TEXTS), rng.choice(NUMBERS)]
    return {rng.choice(names): any_array(rng) for _ in range(rng.randrange(1, 3))}


def test_sessions() -> None:
    sessions = [xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine=e) for e in ("onnxruntime", "null")]
    expected = sessions[0].run({"image": X})["logits"]
    for seed, rng in cases():
        feeds, session = any_feeds(rng), rng.choice(sessions)
        expect_ours(seed, lambda s=session, f=feeds: s.run(f))
        expect_ours(seed, lambda s=session, f=feeds: s.bind(f).run())
        expect_ours(seed, lambda s=session, f=feeds: s.bind({"image": X}, f).run())
        expect_ours(seed, lambda s=session, f=feeds: s.run_async(f).result())
        shape = tuple(rng.choice((*NUMBERS, "N", None, 1.5)) for _ in range(rng.choice((0, 2, 4))))
        expect_ours(seed, lambda s=session, n=shape: s.bind({"image": n}))
    np.testing.assert_array_equal(sessions[0].run({"image": X})["logits"], expected)
    for session in sessions:
        session.close()


def test_tensors_and_operations() -> None:
    for seed, rng in cases():
        array, other = any_array(rng), any_array(rng)
        dtype, device = rng.choice(("float32", "int8", *TEXTS)), rng.choice(("cpu", *TEXTS))
        shape = [rng.choice((*NUMBERS, "x", None)) for _ in range(rng.randrange(4))]
        # What is not of the Python type that a function states is a TypeError; a producer may raise what it likes.
        expect_ours(seed, lambda a=array: xrt.Tensor.from_dlpack(a), TypeError, BufferError)
        expect_ours(seed, lambda a=array: xrt.Tensor.from_numpy(a), TypeError)
        expect_ours(seed, lambda s=shape, t=dtype, d=device: xrt.Tensor.empty(s, t, d), TypeError)
        expect_ours(seed, lambda a=array, b=other: xrt.ops.matmul(a, b))
        expect_ours(seed, lambda a=array, b=other: xrt.ops.layer_norm(a, b), TypeError)
        expect_ours(seed, lambda d=device: xrt.InferenceSession(xrt.demo_model_path(), device=d, engine="null"))
