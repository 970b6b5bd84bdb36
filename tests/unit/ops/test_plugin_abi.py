# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Versions of the kernel plugin ABI: libraries built against version 1 go on working, and what version 2 adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from plugin_tools import build_library

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.ops.plugins import load_library

HERE = Path(__file__).parent
#: Version 1 of the header as it was published; it never changes.
ABI1 = ("-DABI1", f"-I{HERE}")
EPSILON = 1e-5
X32 = np.ones((3, 8), np.float32)
X64 = np.ones((3, 8), np.float64)


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    def build(*options: str, source: str = "settings_plugin.cpp") -> Path:
        return build_library(HERE / source, tmp_path / "plugin.so", *options)

    yield build
    for backend in ("settings", "faulty"):
        _core.KernelRegistry.instance().remove(backend)


def folded(x: np.ndarray, weight: np.ndarray, out: np.ndarray, *numbers: int) -> float:
    """What `settings.conv` writes, from what the caller gave."""
    values = [
        value
        for array in (x, weight, out)
        for size, stride in zip(array.shape, array.strides, strict=True)
        for value in (size, stride // array.itemsize)
    ]
    return float(np.float32(sum(value * 1.25**index for index, value in enumerate([*values, *numbers]))))


@pytest.mark.parametrize("options", [ABI1, ()], ids=["version 1", "version 2"])
def test_both_versions_read_every_field(build: Callable[..., Path], options: tuple[str, ...]) -> None:
    load_library(build(*options))
    x = np.ones((2, 6, 9, 11), np.float32)
    weight = np.ones((4, 3, 2, 3), np.float32)
    attributes = {"stride": (2, 3), "dilation": (3, 2), "padding": (1, 2, 3, 4), "groups": 2}
    out = xrt.ops.conv2d(x, weight, **attributes, kernel="settings.conv")
    expected = folded(x, weight, out, 2, 2, 3, 3, 2, 1, 2, 3, 4)
    assert out.size
    assert (out == expected).all()
    y = xrt.ops.rms_norm(X32, eps=EPSILON, kernel="settings.rms_norm")
    assert (y == np.float32(EPSILON)).all()


@pytest.mark.parametrize("options", [(), ("-DSTRICT",)], ids=["takes any version", "takes version 1 only"])
def test_a_library_of_version_1_works_and_fails_as_before(build: Callable[..., Path], options: tuple[str, ...]) -> None:
    """Also one that does not look at the version that it is asked for: its structs are those of version 1."""
    ids = load_library(build(*ABI1, *options, source="faulty_plugin.cpp"))
    assert len(ids) == 7
    a = np.ones((3, 5), np.float32)
    assert (xrt.ops.matmul(a, a.T.copy(), kernel="faulty.ones") == 1).all()
    with pytest.raises(UnsupportedOperationError, match="it refuses and gives no reason"):
        xrt.ops.matmul(a, a.T.copy(), kernel="faulty.silent")
    (listed,) = (kernel for kernel in xrt.ops.kernels("matmul") if kernel.id == "faulty.ones")
    assert listed.automatic
    assert listed.families == ()
    with pytest.raises(InputError, match="has no configurations"):
        xrt.ops.matmul(a, a.T.copy(), kernel="faulty.ones@fast")


def test_version_2_gets_the_epsilon_in_double(build: Callable[..., Path]) -> None:
    load_library(build())
    y = xrt.ops.rms_norm(X64, eps=EPSILON, kernel="settings.rms_norm")
    assert (y == EPSILON).all()
    assert float(np.float32(EPSILON)) != EPSILON  # it would show


def test_version_1_is_not_given_a_rounded_epsilon(build: Callable[..., Path]) -> None:
    load_library(build(*ABI1))
    with pytest.raises(UnsupportedOperationError, match=r"version 1 of kernel_plugin\.h, where epsilon is a float"):
        xrt.ops.rms_norm(X64, eps=EPSILON, kernel="settings.rms_norm")
    y = xrt.ops.rms_norm(X64, eps=2**-10, kernel="settings.rms_norm")
    assert (y == 2**-10).all()


def test_auto_leaves_out_what_is_explicit_only(build: Callable[..., Path]) -> None:
    load_library(build())
    (listed,) = (kernel for kernel in xrt.ops.kernels("rms_norm") if kernel.id == "settings.rms_norm")
    assert not listed.automatic
    assert set(listed.families) == {"cpu", "torch"}
    policy = xrt.KernelPolicy(auto_strategy="best_performance")
    xrt.ops.rms_norm(X32, policy=policy)
    assert not xrt.decisions()[-1].chosen.startswith("settings.")


def test_a_policy_means_it_by_its_family(build: Callable[..., Path]) -> None:
    load_library(build())
    y = xrt.ops.rms_norm(X32, eps=EPSILON, policy=xrt.KernelPolicy(rms_norm="torch"))
    assert xrt.decisions()[-1].chosen.startswith("settings.rms_norm")
    assert (y == np.float32(EPSILON)).all()


def test_configurations_are_measured_and_pinned(build: Callable[..., Path]) -> None:
    load_library(build())
    y = xrt.ops.rms_norm(X32, eps=EPSILON, kernel="settings.rms_norm@add=2")
    assert (y == np.float32(EPSILON + 2)).all()
    assert xrt.decisions()[-1].chosen == "settings.rms_norm"
    assert xrt.decisions()[-1].config == "add=2"
    with pytest.raises(UnsupportedOperationError, match=r"cannot be prepared as 'sub=1': it knows add=1 to add=3"):
        xrt.ops.rms_norm(X32, kernel="settings.rms_norm@sub=1")
    policy = xrt.KernelPolicy(rms_norm=["settings.rms_norm"], auto_strategy="best_performance")
    xrt.ops.rms_norm(X32, policy=policy)
    assert xrt.decisions()[-1].chosen == "settings.rms_norm"
    assert xrt.decisions()[-1].config in {"add=0", "add=1", "add=2", "add=3"}


def test_an_odd_configuration_is_refused(build: Callable[..., Path]) -> None:
    load_library(build("-DODD_CONFIG", "-DEXPLICIT_ONLY=0"))
    xrt.ops.rms_norm(X32, policy=xrt.KernelPolicy(auto_strategy="best_performance"))
    reasons = {candidate.id: candidate.reason for candidate in xrt.decisions()[-1].candidates if not candidate.accepted}
    assert "settings.rms_norm.config() gave 'two words', which is no configuration" in reasons["settings.rms_norm"]


def test_a_library_that_is_missing_says_so(build: Callable[..., Path]) -> None:
    load_library(build("-DMISSING"))
    (listed,) = (kernel for kernel in xrt.ops.kernels("rms_norm") if kernel.id == "settings.rms_norm")
    assert not listed.available
    assert listed.reason == "libsettings.so is missing: install it"
    with pytest.raises(UnsupportedOperationError, match=r"libsettings\.so is missing: install it"):
        xrt.ops.rms_norm(X32, kernel="settings.rms_norm")
