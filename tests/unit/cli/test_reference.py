# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The reference page says what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from xpuruntime.cli import ExitCode
from xpuruntime.runtime.doctor.facts import FindingCode

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"


def test_every_finding_of_the_doctor_is_described() -> None:
    codes = {code.value for code in FindingCode}
    assert len(codes) > 20
    assert codes <= set(re.findall(r"`(\w+)`", PAGE.read_text()))


def test_every_exit_code_is_described() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE.read_text(), flags=re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}


@pytest.mark.parametrize(
    "command",
    [
        "devices",
        "doctor",
        "plan",
        "run",
        "oip-check",
        "serve",
        "bench",
        "profile",
        "compile",
        "compare",
        "explain",
        "determinism",
        "diff",
        "export",
        "lock",
        "log",
        "index",
        "verify",
        "kernels",
        "policy",
        "demo",
    ],
)
def test_every_option_is_described(xrt: Any, command: str) -> None:
    text = PAGE.read_text()
    assert f"## xrt {command}" in text
    shown = re.findall(r"--[a-z]+", xrt(command, "--help").out)
    assert [option for option in shown if option not in text] == []
