# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Single operations and collectives with arguments of a wrong type: the error is ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from wrong_arguments import bare_errors

from xpuruntime import distributed, ops


def _ones(*sizes: int) -> np.ndarray[Any, Any]:
    return np.ones(sizes, np.float32)


_HEADS, _ROWS = _ones(1, 2, 3, 4), _ones(2, 4)
_IMAGE, _WEIGHT, _GRADIENT = _ones(1, 1, 4, 4), _ones(1, 1, 3, 3), _ones(1, 1, 2, 2)
#: Each function with arguments that are right; one at a time is wrong.
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention": (ops.attention, {"q": _HEADS, "k": _HEADS, "v": _HEADS}),
    "attention_backward": (
        ops.attention_backward,
        {**dict.fromkeys(("grad_out", "q", "k", "v", "out"), _HEADS), "lse": _ones(1, 2, 3)},
    ),
    "conv2d": (ops.conv2d, {"x": _IMAGE, "weight": _WEIGHT}),
    "conv2d_input_gradient": (
        ops.conv2d_input_gradient,
        {"grad_out": _GRADIENT, "weight": _WEIGHT, "input_size": 4},
    ),
    "conv2d_weight_gradient": (
        ops.conv2d_weight_gradient,
        {"grad_out": _GRADIENT, "x": _IMAGE, "kernel_size": 3},
    ),
    "current_policy": (ops.current_policy, {}),
    "decisions": (ops.decisions, {}),
    "kernels": (ops.kernels, {}),
    "layer_norm": (ops.layer_norm, {"x": _ROWS}),
    "layer_norm_backward": (
        ops.layer_norm_backward,
        {"grad_out": _ROWS, "x": _ROWS, "mean": _ones(2), "rstd": _ones(2)},
    ),
    "matmul": (ops.matmul, {"a": _ROWS, "b": _ones(4, 2)}),
    "rms_norm": (ops.rms_norm, {"x": _ROWS}),
    "rms_norm_backward": (ops.rms_norm_backward, {"grad_out": _ROWS, "x": _ROWS, "rstd": _ones(2)}),
    "use_policy": (ops.use_policy, {}),
    "CollectivePolicy": (distributed.CollectivePolicy, {}),
    "Communicator.init": (distributed.Communicator.init, {"rank": 0, "world_size": 1, "timeout": 1.0}),
    "init_from_env": (distributed.init_from_env, {}),
    "read_choices": (distributed.read_choices, {}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_types_are_named(name: str) -> None:
    function, right = FUNCTIONS[name]
    bare = bare_errors(function, right, more=(float("nan"), -1, 10**30, "", []))
    assert not bare, "\n".join(bare)


def test_bytes_are_no_sizes() -> None:
    with pytest.raises(ValueError, match=r"stride is b'\\x01'. Fix: give a whole number"):
        ops.conv2d(_IMAGE, _WEIGHT, stride=b"\x01")  # type: ignore[arg-type]
