# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Former names of modules and classes: they give what the new ones are, with a warning."""

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


@pytest.mark.parametrize(
    ("module", "former", "now"),
    [
        ("distributed", "Choice", "CollectiveChoice"),
        ("ops.decision_log", "DecisionCandidate", "KernelCandidate"),
        ("planning", "Decision", "Resolution"),
        ("pytorch.allocator", "MemoryReport", "DeviceMemoryReport"),
        ("serving.messages", "Tensor", "InferTensor"),
    ],
)
def test_a_former_class_name_warns_and_is_the_new_class(module: str, former: str, now: str) -> None:
    if module.startswith("pytorch"):
        pytest.importorskip("torch")
    found = importlib.import_module(f"xpuruntime.{module}")
    with pytest.warns(DeprecationWarning, match=f"xpuruntime.{module}.{now}"):
        assert getattr(found, former) is getattr(found, now)
