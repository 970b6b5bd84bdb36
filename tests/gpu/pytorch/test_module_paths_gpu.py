# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One path for each module on CUDA, where backward and recomputation run in threads of autograd."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "pytorch"))

import module_path_cases as cases  # noqa: E402 - it needs the path

pytestmark = [pytest.mark.torch, cases.needs_addon]


@pytest.mark.parametrize(
    ("wrap", "call"), [(wrap, call) for wrap in cases.WRAPS for call in cases.CALLS if cases.is_possible(wrap, call)]
)
@pytest.mark.parametrize("way", cases.WAYS)
def test_each_product_belongs_to_the_module_that_pytorch_runs_it_in(wrap, way, call):
    cases.check(wrap, way, call, "cuda", "cublas.cublas")
