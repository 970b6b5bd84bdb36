# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`attribute_events`: device work attributed to calls, from records in the form in which the profiler gives them."""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xpuruntime.pytorch")

from torch.autograd import DeviceType  # noqa: E402

from xpuruntime.pytorch.explanation.attribution import attribute_events  # noqa: E402
from xpuruntime.pytorch.explanation.call_recorder import RecordedCalls  # noqa: E402
from xpuruntime.pytorch.explanation.timeline import MODULE, RANGE  # noqa: E402
from xpuruntime.runtime.profiler import TUNING  # noqa: E402

pytestmark = pytest.mark.torch

BACKWARD = "autograd::engine::evaluate_function: "
_numbers = itertools.count(1000)


class Event:
    """One record, with the methods that kineto's have."""

    def __init__(
        self, name: str, start: int, duration: int, *, device: Any = DeviceType.CPU, thread: int = 1, number: int = 0,
        linked: int = 0, sequence: int = -1, forward: int = 0, annotation: bool = False, resource: int = 77,
    ) -> None:  # fmt: skip
        self._values = {
            "name": name, "start_ns": start, "duration_ns": duration, "device_type": device, "device_index": 0,
            "device_resource_id": resource, "start_thread_id": thread, "end_thread_id": thread,
            "correlation_id": number or next(_numbers), "linked_correlation_id": linked, "sequence_nr": sequence,
            "fwd_thread_id": forward, "is_user_annotation": annotation, "is_hidden_event": False, "is_async": False,
            "shapes": [], "dtypes": [],
        }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return lambda: self._values[name]


def kernel(name: str, start: int, duration: int, number: int, linked: int = 0) -> Event:
    return Event(name, start, duration, device=DeviceType.CUDA, number=number, linked=linked)


def launch(start: int, number: int, linked: int = 0, name: str = "cudaLaunchKernel", thread: int = 0) -> Event:
    # The profiler tells the thread of a launch by the system's number alone.
    return Event(name, start, 5, number=number, linked=linked, thread=thread)


@pytest.fixture
def kinds() -> list[RecordedCalls]:
    calls = []
    for number, (name, op) in enumerate((("mm", "matmul"), ("native_layer_norm", "layer_norm"))):
        seen = RecordedCalls(number, name, op, None, "layers.0", "train", [torch.ones(2, 2)])
        seen.count = 1
        calls.append(seen)
    return calls


def times(joined: Any) -> dict[int, int]:
    results: dict[int, int] = {}
    for key, share in joined.calls.items():
        results[key.kind] = results.get(key.kind, 0) + share.ns
    return results


def rest(joined: Any) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(key.what, key.op, key.operator): (share.ns, share.count) for key, share in joined.rest.items()}


def test_a_kernel_that_an_operator_inside_a_range_launched(kinds):
    events = [
        Event("aten::mm", 0, 100, number=1),
        Event(f"{RANGE}0", 10, 80, number=2),
        Event("aten::copy_", 20, 30, number=3),
        launch(25, 501, linked=3),
        kernel("copy", 1000, 7, 501, linked=3),
    ]
    assert times(attribute_events(events, kinds)) == {0: 7}


def test_a_kernel_of_ours_that_was_launched_right_in_a_range(kinds):
    # Linked to the operator around the range, because ours is no operator: the moment of the launch decides.
    events = [
        Event("aten::mm", 0, 100, number=1),
        Event(f"{RANGE}0", 10, 40, number=2),
        launch(20, 501, linked=1),
        kernel("skinny", 1000, 7, 501, linked=1),
    ]
    joined = attribute_events(events, kinds)
    assert joined.kind == "device"
    assert times(joined) == {0: 7}
    assert joined.rest == {}


def test_a_kernel_that_prepared_the_call_is_its_own(kinds):
    events = [
        Event("aten::mm", 0, 100, number=1),
        Event("aten::contiguous", 1, 8, number=4),
        Event(f"{RANGE}0", 10, 40, number=2),
        launch(3, 500, linked=4),
        kernel("copy", 900, 3, 500, linked=4),
        launch(20, 501, linked=1),
        kernel("skinny", 1000, 7, 501, linked=1),
    ]
    assert times(attribute_events(events, kinds)) == {0: 10}


def test_what_follows_in_the_same_operator_is_not_the_callers(kinds):
    events = [
        Event("aten::linear", 0, 200, number=1),
        Event("aten::mm", 10, 50, number=2),
        Event(f"{RANGE}0", 20, 30, number=3),
        Event("aten::add", 100, 50, number=4),
        launch(30, 501, linked=3),
        kernel("gemm", 1000, 7, 501, linked=3),
        launch(110, 502, linked=4),
        kernel("add", 1010, 2, 502, linked=4),
    ]
    joined = attribute_events(events, kinds)
    assert times(joined) == {0: 7}
    assert rest(joined) == {("other", "", "aten::add"): (2, 1)}


def test_a_replay_is_opaque_and_counted_by_launches(kinds):
    events = [
        Event("step", 0, 100, number=1, annotation=True),
        launch(10, 600, name="cudaGraphLaunch"),
        kernel("nvjet_gemm", 1000, 7, 600),
        kernel("softmax", 1010, 5, 600),
        launch(50, 601, name="cudaGraphLaunch"),
        kernel("nvjet_gemm", 1100, 7, 601),
    ]
    assert rest(attribute_events(events, kinds)) == {("replay", "", "CUDA graph"): (19, 2)}


def test_kernels_without_operator_are_told_by_name(kinds):
    events = [
        Event("triton_per_fused_native_layer_norm_0", 0, 10, number=1),
        launch(2, 501, linked=1),
        kernel("triton_per_fused_native_layer_norm_0", 1000, 4, 501, linked=1),
        Event("triton_poi_fused_addmm_relu_1", 20, 10, number=2),
        launch(22, 502, linked=2),
        kernel("triton_poi_fused_addmm_relu_1", 1010, 3, 502, linked=2),
        launch(40, 503),
        kernel("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", 1020, 9, 503),
        launch(50, 504),
        kernel("void pytorch_flash::flash_fwd_kernel<...>", 1030, 6, 504),
        launch(60, 505),
        kernel("unknown_kernel", 1040, 1, 505),
    ]
    found = rest(attribute_events(events, kinds))
    assert found[("uncovered", "layer_norm", "triton_per_fused_native_layer_norm_0")][0] == 4
    # A bias and an activation beside a product that the operator itself ran.
    assert found[("other", "", "triton_poi_fused_addmm_relu_1")] == (3, 1)
    assert found[("uncovered", "matmul", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT")] == (9, 1)
    assert found[("uncovered", "attention", "void pytorch_flash::flash_fwd_kernel<...>")] == (6, 1)
    assert found[("other", "", "unknown_kernel")] == (1, 1)


@pytest.fixture
def triton_modules(tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="pip install triton")
    for package, functions in (("norms_a", ("fused_scale", "shared", "tuned_rms_norm")), ("norms_b", ("shared",))):
        code = "import triton\n"
        for name in functions:
            tuner = "@triton.autotune(configs=[triton.Config({})], key=[])\n" if name.startswith("tuned") else ""
            code += f"{tuner}@triton.jit\ndef {name}(x):\n    pass\n"
        (tmp_path / f"{package}.py").write_text(code)
        folder = tmp_path / f"foreign_{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: foreign-{package}\nVersion: 1.0\n")
        (folder / "top_level.txt").write_text(package)
    (tmp_path / "user.py").write_text("from norms_a import fused_scale\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("norms_a", "norms_b", "user")
    for name in names:
        importlib.import_module(name)
    yield
    for name in names:
        del sys.modules[name]


@pytest.mark.usefixtures("triton_modules")
def test_kernels_of_triton_are_told_by_the_loaded_function_of_their_name(kinds):
    events = [
        Event("step", 0, 100, number=1, annotation=True),
        *(launch(10 * number, 500 + number) for number in range(1, 5)),
        kernel("fused_scale", 1000, 4, 501),
        kernel("shared", 1010, 3, 502),
        kernel("triton_poi_fused_add_0", 1020, 1, 503),
        kernel("tuned_rms_norm", 1030, 5, 504),
    ]
    joined = attribute_events(events, kinds)
    found = rest(joined)
    assert found[("unknown", "unknown:foreign-norms_a", "norms_a.fused_scale of foreign-norms_a")] == (4, 1)
    both = "norms_a.shared of foreign-norms_a or norms_b.shared of foreign-norms_b"
    assert found[("unknown", "unknown:foreign-norms_a or foreign-norms_b", both)] == (3, 1)
    assert found[("other", "", "triton_poi_fused_add_0")] == (1, 1)
    (norm,) = (key for key in joined.rest if key.op == "rms_norm")
    assert norm.reason.endswith("norms_a.tuned_rms_norm of foreign-norms_a")


def test_work_of_a_thread_without_records_is_nobodys(kinds):
    events = [
        Event("aten::add", 0, 10, number=1),
        Event("cudaLaunchKernel", 3, 5, number=501, resource=99),
        kernel("nvjet_gemm", 1000, 7, 501),
    ]
    found = rest(attribute_events(events, kinds))
    assert found == {("elsewhere", "matmul", "nvjet_gemm"): (7, 1)}


def test_what_is_measured_for_a_choice_is_no_work_of_the_program(kinds):
    events = [
        Event("aten::mm", 0, 200, number=1),
        Event(TUNING, 10, 80, number=2, annotation=True),
        Event("aten::fill_", 20, 10, number=3),
        Event(f"{RANGE}0", 100, 40, number=4),
        launch(12, 500, linked=1),
        kernel("candidate", 900, 50, 500, linked=1),
        launch(22, 501, linked=3),
        kernel("fill", 960, 3, 501, linked=3),
        launch(110, 502, linked=1),
        kernel("gemm", 1000, 7, 502, linked=1),
    ]
    joined = attribute_events(events, kinds)
    assert times(joined) == {0: 7}
    assert rest(joined) == {("other", "", "xpuruntime, tuning"): (53, 2)}


def test_an_operator_that_escaped_has_the_kernels_below_it(kinds):
    events = [
        Event(f"{MODULE}encoder.rnn", 0, 200, number=9),
        Event("aten::_cudnn_rnn", 10, 100, number=1, sequence=5),
        Event("aten::empty", 20, 10, number=2),
        launch(50, 501, linked=1),
        kernel("gemm", 1000, 40, 501, linked=1),
        Event(f"{BACKWARD}CudnnRnnBackward0", 500, 90, number=3, sequence=5, forward=1, thread=2),
        Event("aten::_cudnn_rnn_backward", 510, 70, number=4, thread=2),
        launch(520, 502, linked=4),
        kernel("gemm", 1100, 60, 502, linked=4),
    ]  # fmt: skip
    found = {
        (key.operator, key.module, key.phase): share.ns for key, share in attribute_events(events, kinds).rest.items()
    }
    assert found == {
        ("aten::_cudnn_rnn", "encoder.rnn", "train"): 40,
        ("aten::_cudnn_rnn_backward", "encoder.rnn", "backward"): 60,
    }


def test_ranges_that_the_device_repeats_are_no_work(kinds):
    events = [
        Event("aten::mm", 0, 100, number=1),
        Event(f"{RANGE}0", 10, 80, number=2),
        launch(25, 501, linked=2),
        kernel("gemm", 1000, 7, 501, linked=2),
        Event("xpuruntime matmul", 990, 50, device=DeviceType.CUDA, annotation=True),
    ]
    joined = attribute_events(events, kinds)
    assert times(joined) == {0: 7}
    assert joined.rest == {}


def test_times_of_the_cpu_are_each_counted_once(kinds):
    events = [
        Event("aten::linear", 0, 100, number=1),
        Event("aten::mm", 10, 80, number=2),
        Event(f"{RANGE}0", 30, 50, number=3),
        Event("aten::empty", 40, 5, number=4),
    ]
    joined = attribute_events(events, kinds)
    assert joined.kind == "cpu"
    assert times(joined) == {0: 50}
    assert joined.overhead_ns == 30
    assert rest(joined) == {("other", "", "aten::linear"): (20, 1)}


def test_two_threads_do_not_mix(kinds):
    events = [
        Event("aten::mm", 0, 100, number=1),
        Event(f"{RANGE}0", 10, 80, number=2),
        Event("aten::native_layer_norm", 5, 100, number=3, thread=2),
        Event(f"{RANGE}1", 15, 80, number=4, thread=2),
        launch(20, 501, linked=3),
        kernel("norm", 1000, 3, 501, linked=3),
    ]
    joined = attribute_events(events, kinds)
    assert times(joined) == {0: 0, 1: 3}
