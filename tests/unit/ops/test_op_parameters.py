# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arguments of the core's operations: one list of parameters, and contexts by type, not by place in a tuple."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.ops.call_context import CallContext, ambient_context

STUBS = Path(xrt.__file__).parent / "_core_stubs" / "ops.pyi"
A = np.ones((2, 2), np.float32)


def stubs() -> dict[str, tuple[str, ...]]:
    tree = ast.parse(STUBS.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("op_")]
    return {node.name: tuple(posonlyarg.arg for posonlyarg in node.args.posonlyargs) for node in functions}


def test_the_stubs_have_the_parameters_of_the_core() -> None:
    """So that the type checker sees calls whose arguments stand in another order or number."""
    assert stubs() == _core.OP_PARAMETERS
    assert len(_core.OP_PARAMETERS) == 8


@pytest.mark.parametrize("given", [None, (), (1, 2, 3), object()])
@pytest.mark.parametrize("name", sorted(_core.OP_PARAMETERS))
def test_what_is_no_context_is_refused(name: str, given: object) -> None:
    arguments = [given, *[None] * (len(_core.OP_PARAMETERS[name]) - 1)]
    with pytest.raises(TypeError, match="expected a CallContext"):
        getattr(_core, name)(*arguments)


def matmul(context: _core.CallContext) -> np.ndarray:
    return _core.op_matmul(context, A, A, None, None, None, None, None, None, None, None)


def test_a_context_is_read_by_type() -> None:
    place = ambient_context()
    assert isinstance(place, CallContext)
    assert (matmul(place) == 2).all()
    bare = _core.CallContext(place.site, allow_tf32=True, deterministic=False)
    assert (bare.site, bare.allow_tf32, bare.deterministic, bare.below_autograd) == (place.site, True, False, False)
    assert (matmul(bare) == 2).all()
    with pytest.raises(AttributeError):
        bare.allow_tf32 = False  # type: ignore[misc]


def test_contexts_that_come_and_go_keep_apart() -> None:
    """The last one is remembered; another one may then have its address."""
    site = ambient_context().site
    for _ in range(50):
        for deterministic in (False, True):
            context = _core.CallContext(site, allow_tf32=False, deterministic=deterministic)
            assert (matmul(context) == 2).all()
            del context
        gc.collect(0)
