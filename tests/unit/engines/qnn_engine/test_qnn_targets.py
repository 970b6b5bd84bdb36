# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
from __future__ import annotations

import pytest

import xpuruntime as xrt
from xpuruntime.engines.qnn.options import Target, resolve_target


def test_a_name_is_both_numbers() -> None:
    target = resolve_target({"soc": "SM8650"})
    assert target is not None
    assert (target.soc_model, target.htp_arch, target.name) == (57, 75, "sm8650")
    assert str(target) == "SM8650 (soc_model 57, HTP v75)"
    assert resolve_target({"soc_model": 57}) == target
    assert resolve_target({"soc_model": "57", "htp_arch": "v75"}) == target
    assert resolve_target({"soc": "sm8650", "soc_model": 57, "htp_arch": 75}) == target


def test_no_chip_is_no_default() -> None:
    assert resolve_target({}) is None
    assert resolve_target({"vtcm_mb": 8}) is None


def test_a_chip_that_is_not_in_the_table() -> None:
    assert resolve_target({"soc_model": 64, "htp_arch": 69}) == Target(name=None, soc_model=64, htp_arch=69)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"soc": "sm8651"}, r"unknown chip 'sm8651'; did you mean 'sm8650'\?"),
        ({"soc": "banana"}, r"unknown chip 'banana'\. Known: sm8350"),
        ({"soc": 57}, r"unknown chip '57'"),
        ({"soc_model": 64}, r"architecture of chip 64 is not known here. Fix: state htp_arch"),
        ({"soc_model": "many"}, r"soc_model: 'many' is no number"),
        ({"soc_model": 0}, r"soc_model: '0' is no number from 1"),
        ({"htp_arch": 75}, r"several chips have this architecture"),
        ({"soc_model": 57, "htp_arch": 73}, r"73 contradicts soc_model 57"),
        ({"soc_model": 57, "htp_arch": 12}, r"'12' is none of the architectures 68"),
        ({"soc": "sm8650", "soc_model": 43}, r"43 contradicts soc sm8650"),
        ({"soc": "sm8650", "htp_arch": "v73"}, r"v73 contradicts soc sm8650"),
    ],
)
def test_refusals_name_the_fix(given: dict[str, object], message: str) -> None:
    with pytest.raises(xrt.PolicyError, match=message):
        resolve_target(given)
