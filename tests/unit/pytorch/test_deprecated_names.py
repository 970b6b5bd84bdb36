# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Former names of `xpuruntime.pytorch`: each is the present one, and warns where it is used."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="xpuruntime.pytorch requires PyTorch")

import xpuruntime.pytorch as xt
from xpuruntime import training

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", sorted(xt._DEPRECATED))
def test_a_former_name_is_the_present_one_and_warns(name):
    present = getattr(xt, xt._DEPRECATED[name])
    for package in (xt, training):
        match = f"{name} is now xpuruntime.pytorch.{xt._DEPRECATED[name]}"
        with pytest.warns(DeprecationWarning, match=match) as seen:
            assert getattr(package, name) is present
        assert not hasattr(package, "__path__") or name not in vars(package), "the next use warns as well"
        assert name not in package.__all__
    assert seen[0].filename, "it names a file"


def test_the_warning_names_the_line_that_uses_the_name():
    with pytest.warns(DeprecationWarning, match="coverage_gaps") as seen:
        _ = xt.escapes
    assert seen[0].filename == __file__
