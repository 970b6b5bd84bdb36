# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Shared libraries of kernels with something wrong: each the right error, and nothing half registered."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from plugin_tools import build_library

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.errors import CudaError, InputError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.ops.plugins import include_folder, load_library

SOURCE = Path(__file__).with_name("faulty_plugin.cpp")
A = np.ones((3, 5), np.float32)
B = np.ones((5, 4), np.float32)


def registered() -> set[tuple[str, str]]:
    return {(kernel.op, kernel.id) for kernel in xrt.ops.kernels()}


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    def build(*defines: str, name: str = "faulty.so") -> Path:
        return build_library(SOURCE, tmp_path / name, *(f"-D{define}" for define in defines))

    before = registered()
    yield build
    _core.KernelRegistry.instance().remove("faulty")
    assert registered() == before


@pytest.mark.parametrize(
    ("define", "said"),
    [
        ("NO_ENTRY", "exports no function xpuruntime_kernels"),
        ("OTHER_ABI", "has no kernels for version 2 of kernel_plugin.h, nor for version 1"),
        ("NO_KERNELS", "has no kernels: it says that their number is 0"),
        ("SMALL", "describes kernel 0 with a struct of 8 bytes instead of at least "),
        ("OTHER_SIZE", "describes kernel 1 with a struct of "),
        ("NO_TEXT", "describes kernel 1 with a text or a function missing"),
        ("OTHER_OP", "describes kernel 1 for the unknown operation 99"),
        ("OTHER_DEVICE", "describes kernel 1 for the unknown device type 7"),
        ("ODD_ID", "kernel id 'faulty.two words' of backend 'faulty' is not one"),
        ("TWICE", "kernel 'faulty.ones' is registered already for matmul"),
        ("TWO_BACKENDS", "several backends, device types or versions, faulty.ones and other.silent"),
        ("NO_FAMILIES", "describes kernel 1 with 2 families and no list"),
        ("NO_FAMILY", "describes kernel 1 with a family missing"),
        (
            "OTHER_FAMILY",
            "describes kernel 1 as one of the family 'flash_v2', which no policy can name for matmul: the families are "
            "cublas, cublasLt, cuda_raw, cpu, torch, inductor",
        ),
        ("NO_PREPARE_CONFIG", "describes kernel 1 with configurations and no function prepare_config"),
        ("TWO_AVAILABLE", "has several functions 'available', in faulty.ones and faulty.silent"),
        ('BACKEND="cpu"', "is of a backend that is not the 'cpu' of cpu."),
        ("UNRESOLVED", "cannot be opened: "),
    ],
)
def test_a_library_with_one_thing_wrong_is_refused(build: Callable[..., Path], define: str, said: str) -> None:
    library = build(define)
    before = registered()
    with pytest.raises(InputError) as caught:
        load_library(library)
    assert said in str(caught.value)
    assert str(library) in str(caught.value)
    assert registered() == before


def test_repaired_it_can_be_loaded(build: Callable[..., Path], tmp_path: Path) -> None:
    """At the same place, in the same process."""
    library = build("OTHER_OP")
    with pytest.raises(InputError, match="unknown operation"):
        load_library(library)
    mended = build(name="mended.so")
    library.unlink()
    shutil.copy(mended, library)
    assert "faulty.ones" in load_library(library)


@pytest.mark.parametrize("content", [None, b"", b"no library", b"\x7fELF" + bytes(100)])
def test_what_is_no_library(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "kernels.so"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match="does not exist" if content is None else "cannot be opened: ") as caught:
        load_library(file)
    assert str(file) in str(caught.value)


def test_a_folder_is_no_library(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a file: folder"):
        load_library(tmp_path)


def test_twice_is_refused_and_the_first_stays(build: Callable[..., Path]) -> None:
    library = build()
    ids = load_library(library)
    assert len(ids) == 7
    assert load_works()
    for again in (library, shutil.copy(library, library.with_name("copy.so"))):
        with pytest.raises(InputError, match=r"kernel 'faulty\.ones' is registered already for matmul"):
            load_library(again)
    assert load_works()


def load_works() -> bool:
    out = np.full((3, 4), np.nan, np.float32)
    xrt.ops.matmul(A, B, out=out, kernel="faulty.ones")
    return bool((out == 1).all())


def test_a_library_for_a_later_header_works(build: Callable[..., Path]) -> None:
    """Its structs are longer, and lie further apart."""
    ids = load_library(build("GROWN"))
    assert ids[0] == "faulty.ones"
    assert ids[-1] == "faulty.fails_silent"
    assert load_works()


def test_scratch_memory_is_of_one_launch_alone(build: Callable[..., Path]) -> None:
    import threading

    load_library(build())
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.extend(load_works() for _ in range(50))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 800


@pytest.mark.parametrize(
    ("kernel", "kind", "said"),
    [
        ("faulty.silent", UnsupportedOperationError, "faulty.silent: it refuses and gives no reason"),
        ("faulty.long_winded", UnsupportedOperationError, "faulty.long_winded: " + "ä" * 255 + "?"),
        ("faulty.unprepared", UnsupportedOperationError, "faulty.unprepared cannot be prepared: the moon is wrong"),
        ("faulty.unprepared_silent", UnsupportedOperationError, "cannot be prepared: it gives no reason"),
        ("faulty.fails", XpuRuntimeError, "faulty.fails failed with 7: the sun is wrong"),
        ("faulty.fails_silent", XpuRuntimeError, "faulty.fails_silent failed with -3: it gives no reason"),
    ],
)
def test_failures_and_refusals(build: Callable[..., Path], kernel: str, kind: type[Exception], said: str) -> None:
    load_library(build())
    for _ in range(2):  # the second time it has been asked already
        with pytest.raises(kind) as caught:
            xrt.ops.matmul(A, B, kernel=kernel)
        assert said in str(caught.value)
        assert not isinstance(caught.value, CudaError)
    assert xrt.ops.matmul(A, B, kernel=[kernel, "cpu.reference"] if kind is UnsupportedOperationError else None).all()


def test_one_that_cannot_be_prepared_lets_the_next_serve(build: Callable[..., Path]) -> None:
    load_library(build())
    out = xrt.ops.matmul(A, B, policy=xrt.KernelPolicy(matmul="faulty.unprepared"))
    assert (out == 5).all()
    decision = xrt.decisions()[-1]
    assert decision.source == "fallback"
    assert any("the moon is wrong" in note for note in decision.notes)


def test_those_that_fail_while_they_are_measured_are_not_taken(build: Callable[..., Path]) -> None:
    load_library(build())
    policy = xrt.KernelPolicy(auto_strategy="best_performance")
    xrt.ops.matmul(A, B, policy=policy)
    decision = xrt.decisions()[-1]
    reasons = {candidate.id: candidate.reason for candidate in decision.candidates if not candidate.accepted}
    assert "failed while it was measured: faulty.fails failed with 7: the sun is wrong" in reasons["faulty.fails"]
    assert "the moon is wrong" in reasons["faulty.unprepared"]
    assert not decision.chosen.startswith("faulty.fail")


def test_texts_that_are_not_utf8_can_be_listed(build: Callable[..., Path]) -> None:
    load_library(build("NOT_UTF8"))
    (silent,) = (kernel for kernel in xrt.ops.kernels("matmul") if kernel.id == "faulty.silent")
    assert silent.description == "caf?"


def test_the_header_is_c() -> None:
    import subprocess

    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    header = Path(include_folder()) / "xpuruntime" / "kernel_plugin.h"
    command = [
        compiler,
        "-std=c99",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
        "-x",
        "c",
        str(header),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
