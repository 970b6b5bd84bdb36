# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Former module names: what plug-ins import under them is what the new modules have, with a warning."""

from __future__ import annotations

import importlib
import sys

import pytest

FORMER = [
    ("engines.book", "engines.control_builder", {"Book": "ControlBuilder"}),
    ("engines.feeds", "engines.input_binding", {"FeedCheck": "InputValidator", "room": "empty_host_array"}),
    ("tuning.spec_parts", "tuning.spec", {"Objective": "Objective", "RayPlacement": "RayPlacement"}),
    ("evidence.moments", "evidence.checkpoints", {"moment": "checkpoint", "COLD": "COLD"}),
]


@pytest.mark.parametrize(("former", "now", "names"), FORMER, ids=[one[0] for one in FORMER])
def test_a_former_module_warns_and_has_the_new_names(former: str, now: str, names: dict[str, str]) -> None:
    sys.modules.pop(f"xpuruntime.{former}", None)
    with pytest.warns(DeprecationWarning, match=f"xpuruntime.{now}"):
        old = importlib.import_module(f"xpuruntime.{former}")
    new = importlib.import_module(f"xpuruntime.{now}")
    for one, other in names.items():
        assert getattr(old, one) is getattr(new, other)
