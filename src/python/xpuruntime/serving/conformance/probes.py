# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Probe inputs for a model that is known by its metadata alone, and the comparison of what it answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.serving.conformance.result import FailedCheck, UnobservableCheck
from xpuruntime.serving.messages import InferTensor
from xpuruntime.serving.protocol.datatypes import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.serving.messages import InferResponse

__all__ = ["check_outputs", "need_same", "probe_inputs"]

#: Two answers to the same request may differ by as much: batches and threads change the order of sums.
_RTOL, _ATOL = 1e-3, 1e-5
_MOST = 1 << 24


def probe_inputs(metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> list[InferTensor]:
    """Return inputs of a model: 0.5 and 0, and empty strings, with free dimensions of size 1 unless stated."""
    found, total = [], 0
    for one in metadata.get("inputs", ()):
        name, datatype = one["name"], DATATYPES.get(one["datatype"])
        if datatype is None:
            raise FailedCheck(f"input {name!r} has the datatype {one['datatype']!r}, which the protocol does not have")
        dims = [int(dim) for dim in one.get("shape", ())]
        shape = tuple(shapes.get(name) or (1 if dim < 0 else dim for dim in dims))
        total += math.prod(shape)
        if total > _MOST or len(shape) > 32:
            raise UnobservableCheck(f"with input {name!r} of the shape {list(shape)}, a probe would be too large")
        if datatype.is_bytes:
            array = np.full(shape, b"", object)
        elif datatype.name == "BF16":
            array = np.full(shape, 0x3F00, datatype.dtype)
        else:
            array = np.full(shape, 0.5 if datatype.dtype.kind == "f" else 0, datatype.dtype)
        found.append(InferTensor(name, datatype.name, shape, array))
    return found


def check_outputs(response: InferResponse, metadata: Mapping[str, Any], model: str) -> None:
    """Raise FailedCheck where a response is not of the model that the metadata describe."""
    if response.model != model:
        raise FailedCheck(f"model_name is {response.model!r}, and {model!r} was asked")
    stated = {one["name"]: one for one in metadata.get("outputs", ())}
    if not response.outputs:
        raise FailedCheck("there are no outputs")
    for one in response.outputs:
        facts = stated.get(one.name)
        if facts is None:
            raise FailedCheck(f"output {one.name!r} is not in the metadata")
        if facts["datatype"] != one.datatype:
            raise FailedCheck(f"output {one.name!r} is {one.datatype}, and {facts['datatype']} in the metadata")
        dims = [int(dim) for dim in facts.get("shape", ())]
        if len(dims) != len(one.shape) or any(dim not in (size, -1) for dim, size in zip(dims, one.shape, strict=True)):
            raise FailedCheck(f"output {one.name!r} has the shape {list(one.shape)}, and {dims} in the metadata")


def need_same(one: InferResponse, other: InferResponse, what: str) -> None:
    """Raise FailedCheck where two answers to the same request differ."""
    first, second = ({tensor.name: tensor for tensor in answer.outputs} for answer in (one, other))
    if first.keys() != second.keys():
        raise FailedCheck(f"{what} has the outputs {sorted(second)}, not {sorted(first)}")
    for name, tensor in first.items():
        again = second[name]
        if (tensor.shape, tensor.datatype) != (again.shape, again.datatype):
            raise FailedCheck(f"{what} has {name!r} as {again.datatype} {again.shape}")
        if tensor.data.dtype.kind == "f":
            same = np.allclose(tensor.data, again.data, rtol=_RTOL, atol=_ATOL, equal_nan=True)
        else:
            same = bool((tensor.data == again.data).all())
        if not same:
            raise FailedCheck(f"{what} has other values of {name!r}")
