# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A profile as a value: sums, tables, plain values, and the file that it writes, or refuses to write."""

from __future__ import annotations

import errno
import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from xpuruntime.errors import InputError
from xpuruntime.evidence.profile import Profile, check_trace
from xpuruntime.runtime.profiler import DeviceRecording, DeviceWork, HostCall, Mark, Range

if TYPE_CHECKING:
    from pathlib import Path

GEMM = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>(Params)"


def profile(**changed: Any) -> Profile:
    def copied(start: int, size: int, source: str) -> DeviceWork:
        return DeviceWork("copy", "copy", 0, 1, start, start + 1500, bytes=size, source=source, destination="device")

    given: dict[str, Any] = {
        "source": "cupti",
        "start_ns": 0,
        "end_ns": 3_000_000,
        "ranges": (
            Range(1, 0, "epoch", "range", 1, 0, 2_000_000),
            Range(2, 1, "m on e@cuda:0", "run", 1, 0, 500_000),
            Range(3, 1, "m on e@cuda:0", "run", 1, 600_000, 800_000),
        ),
        "work": (
            DeviceWork("kernel", GEMM, 0, 1, 0, 6000),
            DeviceWork("kernel", GEMM, 0, 1, 7000, 9000),
            copied(10_000, 1000, "host (pinned)"),
            copied(20_000, 500, "host (pinned)"),
            copied(30_000, 20, ""),
            DeviceWork("fill", "fill", 0, 1, 40_000, 42_500, bytes=64, destination="device"),
            DeviceWork("wait", "the host waits", 0, 1, 50_000, 950_000),
            DeviceWork("allocation", "allocation", 0, 1, 60_000, 60_000, bytes=4096),
            DeviceWork("release", "release", 0, 1, 70_000, 70_000, bytes=4096),
        ),
        "calls": (HostCall("cudaLaunchKernel", 1, 0, 10, 1),),
    }
    return Profile(DeviceRecording(**{**given, **changed}), (Mark("tuning", "matmul", 5, 9, 1, {}),))


def test_shares_sum_what_is_alike() -> None:
    shares = [tuple(share) for share in profile().shares()]
    assert shares == [
        ("range", "epoch", 1, 2000.0, 0),
        ("range", "m on e@cuda:0", 2, 700.0, 0),
        ("kernel", GEMM, 2, 8.0, 0),
        ("copy", "host (pinned) -> device", 2, 3.0, 1500),
        ("copy", "? -> device", 1, 1.5, 20),
        ("fill", "fill", 1, 2.5, 64),
        ("wait", "the host waits", 1, 900.0, 0),
        ("allocation", "allocation", 1, 0.0, 4096),
        ("release", "release", 1, 0.0, 4096),
    ]


def test_plain_values_go_through_json() -> None:
    whole = profile(notes=("something is missing",), dropped=3)
    values = json.loads(json.dumps(whole.to_dict()))
    assert values["schema"] == "xpuruntime.profile/1"
    assert (values["source"], values["notes"], values["dropped"]) == ("cupti", ["something is missing"], 3)
    assert values["duration_us"] == 3000.0
    assert values["shares"][0] == {"what": "range", "name": "epoch", "times": 1, "us": 2000.0, "bytes": 0}
    assert len(values["shares"]) == len(whole.shares())


def test_what_is_printed() -> None:
    text = str(profile(notes=("something is missing",)))
    assert text.startswith("3.00 ms; device work: by CUPTI")
    [kernel] = [line.split() for line in text.splitlines() if line.startswith("kernel")]
    assert kernel == [
        "kernel",
        "cutlass_80_simt_sgemm_128x32_8x5_tn_align1",
        "2",
        "8.0",
        "53%",
    ]  # of 15 us of kernels, copies and fills
    [wait] = [line.split() for line in text.splitlines() if line.startswith("wait")]
    assert wait[-2:] == ["1", "900.0"]  # no share: it is no work
    assert "1,500" in text
    assert "note: something is missing" in text
    assert "release" not in text


@pytest.mark.parametrize(
    ("source", "words"),
    [("none", "not recorded"), ("kineto", "PyTorch's profiler"), ("events", "CUDA events")],
)
def test_the_first_line_says_where_device_work_comes_from(source: str, words: str) -> None:
    whole = profile(source=source)
    assert words in str(whole).splitlines()[0]
    assert f"source {source}" in repr(whole)
    assert "3 ranges, 9 pieces of device work" in repr(whole)


def test_names_with_markup_are_text() -> None:
    text = str(profile(ranges=(Range(1, 0, "[red]x[/red] [bold", "range", 1, 0, 5),)))
    assert "[red]x[/red] [bold" in text


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_trace_is_written_as_a_whole(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    target.write_bytes(b"old")
    assert profile().save_trace(str(target), {"run": 5}) == target
    data = target.read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert trace["metadata"]["run"] == 5
    assert sum(traceevent.get("cat") == "kernel" for traceevent in trace["traceEvents"]) == 2
    assert any(traceevent["name"] == "matmul" for traceevent in trace["traceEvents"])
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["trace", "trace.txt", "trace.json.bz2", "trace.JSON", ""])
def test_another_ending_is_refused(tmp_path: Path, name: str) -> None:
    for refused in (check_trace, profile().save_trace):
        with pytest.raises(InputError, match=r"'\.json' or '\.json\.gz'.*end it so"):
            refused(tmp_path / name)


def test_a_place_that_cannot_be_written_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("")
    for path, reason in (
        (tmp_path / "no" / "t.json", "No such file or directory"),
        (tmp_path / "folder.json", "Is a directory"),
        (tmp_path / "file" / "t.json", "Not a directory"),
    ):
        for refused in (check_trace, profile().save_trace):
            with pytest.raises(InputError) as error:
                refused(path)
            assert f"cannot write the trace to '{path}': {reason}" in str(error.value)


def test_a_folder_without_the_right_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that belongs to somebody else: tests may run as root, who may write anywhere."""

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refused)
    with pytest.raises(InputError, match="Permission denied"):
        check_trace(tmp_path / "t.json")


def test_a_check_leaves_nothing_and_an_old_trace_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("old")
    check_trace(tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert (tmp_path / "t.json").read_text() == "old"
