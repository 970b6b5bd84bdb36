# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Memory of callers on the torch engine: programs that return, or write, what belongs to somebody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from buffer_cases import SMALL
from buffer_checks import check_bound, check_runs, layouts

torch = pytest.importorskip("torch")

from buffer_programs import PROGRAMS, open_program  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from buffer_cases import BufferCase


@pytest.mark.parametrize("exported", [False, True], ids=["module", "exported"])
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_runs(case: BufferCase, exported: bool, tmp_path: Path) -> None:
    with open_program(case, SMALL, tmp_path if exported else None) as session:

        def tensors(feeds: dict[str, Any]) -> dict[str, Any]:
            results = session.run({name: torch.from_numpy(array) for name, array in feeds.items()})
            return {name: value.numpy() for name, value in results.items()}

        check_runs(session.run, case, (SMALL,) * 3)
        check_runs(tensors, case, (SMALL,) * 3)
        check_runs(lambda feeds: session.run_async(feeds).result(), case, (SMALL,) * 2)
        check_runs(session.run, case, (SMALL,), layout=layouts["read_only"])
        check_runs(session.run, case, (SMALL,), layout=layouts["strided"])
        check_bound(session, case, SMALL)
        feeds = case.feeds(1, SMALL)
        kept = {name: array.copy() for name, array in feeds.items()}
        session.explain(feeds, runs=1)
        for name, array in feeds.items():
            np.testing.assert_array_equal(array, kept[name], err_msg=f"{name} after explain")


@pytest.mark.parametrize("name", ["in_place", "two_inputs", "transpose"])
def test_a_buffer_that_is_input_and_output(name: str) -> None:
    case = next(case for case in PROGRAMS if case.name == name)
    arrays = case.feeds(0, SMALL)
    first = next(iter(arrays))
    with open_program(case, SMALL) as session:
        binding = session.bind(arrays, {"z": arrays[first]})
        want = {key: np.array(array) for key, array in case.compute(arrays).items()}
        binding.run()
        for key, array in want.items():
            np.testing.assert_allclose(binding.outputs[key], array, rtol=1e-5, err_msg=key)
