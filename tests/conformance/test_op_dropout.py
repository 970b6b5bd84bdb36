# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels whose dropout draws random numbers of its own: right ones pass the suite, wrong ones fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from xpuruntime import _core
from xpuruntime.ops.plugins import KernelBackend, PythonKernel, register
from xpuruntime.testing import NumpyArrays, op_cases
from xpuruntime.testing import op_references as references
from xpuruntime.testing.op_arrays import dropout_factors
from xpuruntime.testing.op_suite import check_case, find_factors

ID = "testing_dropout.numpy"
CASES = [case for case in op_cases() if case.dropout and case.name.endswith("/float32")]

Draw = Callable[[float, int, int, tuple[int, ...]], np.ndarray[Any, Any]]


def draw(p: float, seed: int, offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return factors that are right, and not those of the ops."""
    return np.where(np.random.default_rng([seed, offset]).random(shape) >= p, 1 / (1 - p), 0.0)


class Own(PythonKernel):
    """Attention or its gradient with the factors that a function draws."""

    id = ID
    description = "attention for tests"
    limits = "no mask"
    automatic = False

    def __init__(self, op: str, draw: Draw) -> None:
        self.op = op
        self.draw = draw

    def supports(self, op: Mapping[str, Any]) -> tuple[bool, str]:
        return ("mask" not in op["operands"], "it takes no mask")

    def prepare(self, op: Mapping[str, Any], config: str) -> Callable[[Mapping[str, Any], int], None]:
        attributes = op["attributes"]
        causal = None if attributes["causal"] == "none" else attributes["causal"]

        def run(operands: Mapping[str, Any], stream: int) -> None:
            views = {name: tensor.numpy() for name, tensor in operands.items()}
            q, k, v = (views[name].astype(np.float64) for name in "qkv")
            seed, offset = (int(one) for one in views["rng"])
            factors = self.draw(attributes["dropout_p"], seed, offset, (*q.shape[:3], k.shape[2]))
            numbers = (q, k, v, None, causal, attributes["scale"], factors, "float32")
            if self.op == "attention":
                results = references.attention(*numbers)
            else:
                results = references.attention_backward(views["grad_out"].astype(np.float64), *numbers)
            for result in results:
                if result.name in views:
                    views[result.name][...] = result.values

        return run


@pytest.fixture
def use() -> Iterator[Callable[..., None]]:
    backend = KernelBackend("testing_dropout", "cpu", "1")

    def add(forward: Draw, backward: Draw | None = None) -> None:
        register(backend, Own("attention", forward), Own("attention_backward", backward or forward))

    yield add
    _core.KernelRegistry.instance().remove("testing_dropout")


def check(op: str | None = None) -> None:
    for case in CASES:
        if op in (None, case.op):
            check_case(case, ID, NumpyArrays(), other_random_numbers=True)


def test_there_are_cases() -> None:
    assert {case.op for case in CASES} == {"attention", "attention_backward"}
    assert len(CASES) >= 4


@pytest.mark.parametrize("case", [case for case in op_cases() if case.dropout], ids=lambda case: case.name)
def test_every_weight_tells_whether_it_is_dropped(case: Any) -> None:
    weights = case.call().weights
    seen = weights.values > 0
    assert (weights.values[seen] > 4 * weights.bound[seen]).all()


def test_other_numbers_are_right(use: Callable[..., None]) -> None:
    use(draw)
    check()
    with pytest.raises(AssertionError, match="is wrong at"):
        check_case(CASES[0], ID, NumpyArrays())


def test_a_gradient_that_drops_others_fails(use: Callable[..., None]) -> None:
    use(draw, lambda p, seed, offset, shape: draw(p, seed + 1, offset, shape))
    check("attention")
    with pytest.raises(AssertionError, match=r"attention_backward/.*: grad_. is wrong at"):
        check("attention_backward")


def same_for_heads(p: float, seed: int, offset: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.broadcast_to(draw(p, seed, offset, (1, 1, *shape[2:])), shape)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p, *rest: draw(0.9 * p, *rest) * (1 - 0.9 * p) / (1 - p), "weights are kept, expected"),
        (lambda p, *rest: draw(p, *rest) * (1 - p), "weights after dropout is wrong at"),
        (lambda p, seed, offset, shape: np.ones(shape), "weights after dropout is wrong at"),
        (same_for_heads, "two heads drop the same weights"),
        (lambda p, seed, offset, shape: draw(p, 1, offset, shape), "another seed drops the same weights"),
        (lambda p, seed, offset, shape: draw(p, seed, 1, shape), "another offset drops the same weights"),
        (dropout_factors, "those of the op are drawn"),
    ],
)
def test_wrong_dropout_fails(use: Callable[..., None], wrong: Draw, message: str) -> None:
    use(wrong)
    for case in CASES:
        with pytest.raises(AssertionError, match=message):
            find_factors(case, ID, NumpyArrays())


def test_numbers_that_change_fail(use: Callable[..., None]) -> None:
    calls = iter(range(1000))  # the weights of a case take two calls
    use(lambda p, seed, offset, shape: draw(p, seed, offset + next(calls) // 2, shape))
    for case in CASES:
        with pytest.raises(AssertionError, match="the same rng gives other bits the second time"):
            find_factors(case, ID, NumpyArrays())
