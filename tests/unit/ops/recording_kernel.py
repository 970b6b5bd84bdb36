# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A kernel for tests that tells what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Backend:
    name = "recording"
    device_type = "cpu"

    def available(self) -> tuple[bool, str]:
        return True, ""

    def version(self) -> str:
        return "1"


class Recorder:
    """A kernel that computes nothing and remembers what it was given; asked for by name only."""

    description = limits = "for tests"
    automatic = False

    def __init__(self, op: str) -> None:
        self.op = op
        self.id = f"recording.{op}"
        self.described: dict[str, Any] = {}
        self.seen: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {}

    def supports(self, desc: dict[str, Any]) -> tuple[bool, str]:
        return True, ""

    def prepare(self, desc: dict[str, Any], config: str) -> Callable[..., None]:
        self.described = desc

        def run(operands: dict[str, Any], stream: int) -> None:
            self.seen = {name: (x.shape, x.strides, x.data_ptr) for name, x in operands.items()}

        return run
