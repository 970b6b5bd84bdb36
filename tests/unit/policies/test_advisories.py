# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Advisories of packages: each holds with the versions and on the devices that its source names, and no others."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from xpuruntime.policies.advisories import ADVISORIES, AdvisedCall, Advisory, Platform, holding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

CALL = AdvisedCall(gradient=True, mask="", causal=False, queries=64, keys=64)
#: Id, a device of it and another, packages that have the error, and one of them that has it no more.
ROWS = [
    ("flex-flash-block-mask", "sm90", "sm80", {"torch": "2.13.0+cu130", "flash-attn-4": "4.0.0b36"}, {"torch": "2.14"}),
    ("flex-flash-sparse-blocks", "sm90", "sm100", {"flash-attn-4": "4.0.0b13"}, {"flash-attn-4": "4.0.0b14"}),
    ("fa4-gradient-of-wide-heads", "sm100", "sm90", {"flash-attn-4": "4.0.0b11"}, {"flash-attn-4": "4.0.0b36"}),
    ("fa4-gradient-race", "sm90", "sm80", {"flash-attn-4": "4.0.0b9"}, {"flash-attn-4": "4.0.0b10"}),
    ("fa4-forward-of-sm120", "sm120", "sm90", {"flash-attn-4": "4.0.0b12"}, {"flash-attn-4": "4.0.0b36"}),
    ("quack-norm-of-second-width", "sm90", "sm80", {"quack-kernels": "0.3.2"}, {"quack-kernels": "0.6.5"}),
    ("quack-grouped-gemm-unwritten", "sm100", "sm90", {"quack-kernels": "0.6.3"}, {"quack-kernels": "0.6.4"}),
    ("liger-linear-cross-entropy-of-rows", "sm90", "", {"liger-kernel": "0.8.1"}, {"liger-kernel": "0.8.2"}),
    ("liger-cross-entropy-in-place", "sm90", "", {"liger-kernel": "0.8.5"}, {"liger-kernel": "0.8.6"}),
    ("liger-cute-gemma-norm", "sm90", "sm80", {"liger-kernel": "0.8.4"}, {"liger-kernel": "0.8.5"}),
    (
        "fla-gradient-of-gated-delta-rule", "sm90", "sm100",
        {"fla-core": "0.4.2", "triton": "3.6.0"}, {"triton": "3.7.1"},
    ),
    ("vllm-norm-and-partial-rope", "sm90", "sm100", {"vllm": "0.28.0"}, {"vllm": "0.27.1"}),
    (
        "vllm-all-reduce-and-norm", "sm90", "",
        {"vllm": "0.23.0", "flashinfer-python": "0.6.18"}, {"vllm": "0.24.0"},
    ),
]  # fmt: skip


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(packages: Mapping[str, str]) -> None:
        for name, version in packages.items():
            written = name.replace("-", "_")
            for old in tmp_path.glob(f"{written}-*"):
                shutil.rmtree(old)
            folder = tmp_path / f"{written}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return install


def held(arch: str) -> dict[str, Advisory]:
    return {row.id: row for row in holding(Platform((2, 14), (), arch), ADVISORIES) if row.packages}


@pytest.mark.parametrize(("id_", "arch", "other", "packages", "without"), ROWS, ids=[row[0] for row in ROWS])
def test_row_holds_for_its_versions_and_devices_alone(
    site: Callable[[Mapping[str, str]], None],
    id_: str,
    arch: str,
    other: str,
    packages: dict[str, str],
    without: dict[str, str],
) -> None:
    site(packages)
    row = held(arch)[id_]
    assert all(row.concerns(kernel, CALL) for kernel in row.kernels)
    assert row.concerns(row.kernels[0], CALL._replace(gradient=False)) is not row.gradient
    assert not row.concerns("another.kernel", CALL)
    assert id_ not in held("cpu") or not row.archs
    assert not other or id_ not in held(other)
    site(without)
    assert id_ not in held(arch)


def test_every_row_of_a_package_is_tested_and_has_a_fix() -> None:
    rows = {row.id for row in ADVISORIES if row.packages}
    assert rows == {row[0] for row in ROWS}
    assert all(row.fix and row.date for row in ADVISORIES if row.packages)
