# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Provider options in the book of controls: those of the engine that runs, and those kept for others."""

from __future__ import annotations

import pytest

from xpuruntime.engines.control_builder import ControlBuilder
from xpuruntime.engines.registry import default_registry

WORDS = [word for engine in default_registry() for word in (engine.name, *engine.aliases)]


def control(engine: str, asked: object = "auto"):
    key = f"execution.provider_options.{engine}.level"
    book = ControlBuilder({key: "1", "execution.engine": asked})
    book.options("execution.provider_options.onnxruntime", ("onnxruntime", "ort", "onnxrt"), "handed over")
    return book.controls[0]


@pytest.mark.parametrize("word", [word for word in WORDS if word not in ("onnxruntime", "ort", "onnxrt")])
def test_options_of_every_other_engine_wait_for_it(word: str):
    found = control(word)
    assert (found.enforceability, found.resolved) == ("enforced", "-")
    assert word in found.reason


@pytest.mark.parametrize("word", ["onnxruntime", "ort", "onnxrt"])
def test_options_of_the_engine_that_runs_are_handed_over(word: str):
    found = control(word)
    assert (found.resolved, found.reason) == ("1", "handed over")
