# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Memory of callers on a CUDA device: no engine writes into inputs, and no result changes later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from buffer_cases import CASES, LARGE, SMALL, BufferCase, save
from buffer_checks import check_bound, check_runs, on_device
from buffer_programs import PROGRAMS, open_program

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [case.name for case in CASES]
ROWS = (SMALL, LARGE, LARGE, 5, SMALL)
# Products in fp32 and not in TF32, as NumPy computes them.
POLICY = {"execution": {"precision": "fp32"}}


def opened(model: Path) -> xrt.InferenceSession:
    return xrt.InferenceSession(model, engine="onnxruntime", device="cuda:0", policy=POLICY)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.cuda_onnxruntime
def test_host_arrays(name: str, tmp_path: Path) -> None:
    case = _case(name)
    with opened(save(case, tmp_path)) as session:
        results = check_runs(session.run, case, ROWS)
        check_runs(lambda feeds: session.run_async(feeds).result(), case, (LARGE, SMALL, LARGE))
        feeds = case.feeds(0, LARGE)
        if feeds:
            with pytest.raises(
                xrt.InputError, match=r"cannot be bound on cuda:0. Fix: pass its shape, or a CUDA array"
            ):
                session.bind(feeds)
    for got, want in results:
        for output, array in want.items():
            np.testing.assert_allclose(got[output], array, rtol=1e-5, atol=1e-5, err_msg=f"{output} after close")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.cuda_onnxruntime
def test_tensors_on_the_device(name: str, tmp_path: Path) -> None:
    case = _case(name)
    with opened(save(case, tmp_path)) as session:
        check_runs(session.run, case, ROWS, layout=on_device)
        check_runs(lambda feeds: session.run_async(feeds).result(), case, (LARGE, SMALL, LARGE), layout=on_device)
        if case.bindable:
            check_bound(session, case, LARGE, move=on_device)


@pytest.mark.parametrize("name", ["input_is_output", "dropout", "two_inputs", "constants"])
@pytest.mark.cuda_onnxruntime
def test_a_captured_graph(name: str, tmp_path: Path) -> None:
    case = _case(name)
    policy = {"execution": {"precision": "fp32", "cuda_graph": "require"}}
    with xrt.InferenceSession(
        save(case, tmp_path, SMALL), engine="onnxruntime", device="cuda:0", policy=policy
    ) as session:
        check_runs(session.run, case, (SMALL,) * 3)
        check_runs(session.run, case, (SMALL,) * 3, layout=on_device)


@pytest.mark.parametrize("exported", [False, True], ids=["module", "exported"])
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_programs_of_torch(case: BufferCase, exported: bool, tmp_path: Path) -> None:
    with open_program(case, SMALL, tmp_path if exported else None, device="cuda:0", policy=POLICY) as session:
        check_runs(session.run, case, (SMALL,) * 3)
        check_runs(session.run, case, (SMALL,) * 3, layout=on_device)
        check_bound(session, case, SMALL, move=on_device)
        feeds = {name: on_device(array) for name, array in case.feeds(1, SMALL).items()}
        kept: dict[str, Any] = {name: tensor.cpu().numpy().copy() for name, tensor in feeds.items()}
        session.explain(feeds, runs=1)
        for name, tensor in feeds.items():
            np.testing.assert_array_equal(tensor.cpu().numpy(), kept[name], err_msg=f"{name} after explain")


def _case(name: str) -> BufferCase:
    return next(case for case in CASES if case.name == name)
