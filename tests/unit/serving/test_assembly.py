# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requests of one group become one batch, and their outputs come apart, in every shape that is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_models import WAIT, FaultyEngine, Gate, ask, tokens

from xpuruntime import _core
from xpuruntime.engines.model.facts import TensorInfo
from xpuruntime.errors import InputError, PolicyError, UnsupportedOperationError
from xpuruntime.serving.batching import execution
from xpuruntime.serving.batching.execution import Slice, assemble, joined, take_apart
from xpuruntime.serving.batching.layout import DATATYPE_OF, Layout
from xpuruntime.serving.batching.requests import check_request
from xpuruntime.serving.batching.settings import BatchSettings
from xpuruntime.serving.messages import InferRequest, InferTensor, RequestedOutput, ServingError, Status
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

INPUTS = (
    TensorInfo(name="ids", dtype="int64", shape=("N", "L")),
    TensorInfo(name="mask", dtype="bool", shape=("N", "L")),
    TensorInfo(name="side", dtype="float32", shape=(3, "N")),
)
OUTPUTS = (
    TensorInfo(name="kept", dtype="int64", shape=("N", "L")),
    TensorInfo(name="total", dtype="float32", shape=("N",)),
    TensorInfo(name="turned", dtype="float32", shape=(3, "N")),
)


def model(feeds: dict[str, Any]) -> dict[str, Any]:
    """Compute each row of the other rows' values in no way."""
    kept = feeds["ids"] * feeds["mask"]
    return {"kept": kept, "total": kept.sum(axis=1).astype(np.float32), "turned": feeds["side"] * 2}


def request(draw: Any, rows: int, length: int) -> dict[str, np.ndarray]:
    values = np.random.default_rng(draw)
    made = {
        "ids": values.integers(1, 100, (rows, length)),
        "mask": np.ones((rows, length), bool),
        "side": values.random((3, rows), np.float32),
    }
    if draw % 3 == 0:
        made["ids"] = np.asfortranarray(made["ids"])
    elif draw % 3 == 1:
        body = b"\1" + made["ids"].tobytes()
        made["ids"] = np.frombuffer(memoryview(body)[1:], np.int64).reshape(rows, length)
    return dict(sorted(made.items(), reverse=bool(draw % 2)))


SHAPES = st.sampled_from(["pad", "bucket", "fixed"])
REQUESTS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 12)), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(SHAPES, REQUESTS)
def test_each_request_gets_what_it_would_get_alone(shapes: str, drawn: list[tuple[int, int, int]]) -> None:
    sizes = [] if shapes == "pad" else [4, 8, 12]
    rule = {"value": 0, "to": sizes}
    batching = BatchSettings(max_batch_size=16, shapes=shapes, pad={"ids": rule, "mask": rule})
    layout = Layout.of(INPUTS, OUTPUTS, batching)
    fixed = shapes == "fixed"
    requests = [request(*sizes) for sizes in drawn]
    feeds = [check_request(ask("m", request), layout, fixed=fixed) for request in requests]
    groups: dict[Any, list[int]] = {}
    for index, feed in enumerate(feeds):
        groups.setdefault(feed.group, []).append(index)
    if shapes in ("pad", "fixed"):
        assert len(groups) == 1, "all run together"
    for members in groups.values():
        slices = [Slice(feeds[index], 0, feeds[index].rows) for index in members]
        made = assemble(layout, slices, 16 if fixed else 0)
        assert made.rows == (16 if fixed else sum(feeds[index].rows for index in members))
        assert made.elements == sum(array.size for index in members for array in requests[index].values())
        assert made.elements + made.padding == sum(array.size for array in made.feeds.values())
        assert all(array.flags.aligned and array.flags.c_contiguous for array in made.feeds.values())
        pieces = take_apart(layout, model(made.feeds), made.rows, slices)
        for index, outputs in zip(members, pieces, strict=True):
            want = model(requests[index])
            for tensor in joined(layout, feeds[index], {0: outputs}):
                assert tensor.shape == want[tensor.name].shape
                np.testing.assert_array_equal(tensor.data, want[tensor.name])
                assert tensor.data.flags.c_contiguous


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 6))
def test_a_request_that_is_split_is_put_together_again(draw: int, rows: int, most: int) -> None:
    layout = Layout.of(INPUTS, OUTPUTS, BatchSettings(max_batch_size=most))
    asked = request(draw, rows, 5)
    feed = check_request(ask("m", asked), layout)
    pieces = {}
    for start in reversed(range(0, rows, most)):
        part = Slice(feed, start, min(start + most, rows))
        made = assemble(layout, [part])
        (pieces[start],) = take_apart(layout, model(made.feeds), made.rows, [part])
    want = model(asked)
    for tensor in joined(layout, feed, pieces):
        np.testing.assert_array_equal(tensor.data, want[tensor.name])


def test_inputs_without_a_batch_run_together_only_where_they_are_equal() -> None:
    inputs = (
        TensorInfo(name="x", dtype="float32", shape=("N", 2)),
        TensorInfo(name="scale", dtype="float32", shape=(1,)),
    )
    outputs = (TensorInfo(name="y", dtype="float32", shape=("N", 2)),)
    layout = Layout.of(inputs, outputs, BatchSettings(max_batch_size=4))
    x = np.ones((1, 2), np.float32)

    def group(value: float) -> Any:
        return check_request(ask("m", {"x": x, "scale": np.array([value], np.float32)}), layout).group

    assert group(1) == group(1)
    assert group(1) != group(2)


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ([("x", "float32", (4, 2))], [("y", "float32", (4, 2))], "no input of the model begins with an open dimension"),
        ([("x", "float32", ("N", 2))], [("y", "float32", (2,))], "the output 'y' has no batch dimension"),
    ],
)
def test_models_that_have_no_batches(inputs: list, outputs: list, said: str) -> None:
    made = [[TensorInfo(name=n, dtype=d, shape=s) for n, d, s in some] for some in (inputs, outputs)]
    with pytest.raises(PolicyError, match=said):
        Layout.of(*made, BatchSettings(max_batch_size=4))
    assert not Layout.of(*made, BatchSettings()).batched


def test_types_that_the_protocol_lacks_are_refused() -> None:
    info = TensorInfo(name="x", dtype="float8e4m3fn", shape=(1,))
    with pytest.raises(UnsupportedOperationError, match=r"'x' is float8e4m3fn, for which .* has no datatype"):
        Layout.of((info,), (), BatchSettings())
    info = TensorInfo(name="x", dtype="float32", shape=None, kind="sequence")
    with pytest.raises(UnsupportedOperationError, match="a sequence of float32"):
        Layout.of((info,), (), BatchSettings())


TENSORS = st.lists(
    st.tuples(
        st.sampled_from(["ids", "mask", "side", "other", ""]),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
        st.sampled_from(["int64", "bool", "float32", "float64"]),
    ),
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(SHAPES, TENSORS, st.sampled_from([[], ["kept"], ["kept", "kept"], ["none"]]))
def test_any_request_is_accepted_whole_or_refused_as_wrong(shapes: str, drawn: list, outputs: list[str]) -> None:
    rule = {"value": 0, "to": [] if shapes == "pad" else [2]}
    batching = BatchSettings(max_batch_size=4, shapes=shapes, pad={"ids": rule, "mask": rule})
    layout = Layout.of(INPUTS, OUTPUTS, batching)
    tensors = [InferTensor(name, DATATYPE_OF[dtype], shape, np.zeros(shape, dtype)) for name, shape, dtype in drawn]
    asked = InferRequest("m", tensors, outputs=[RequestedOutput(name) for name in outputs])
    feed, refused = None, None
    try:
        feed = check_request(asked, layout, fixed=shapes == "fixed")
    except ServingError as error:
        refused = error
    if feed is None:
        assert refused is not None
        assert refused.code is Status.INVALID_ARGUMENT
        assert len(str(refused)) < 400
        return
    assert sorted(feed.arrays) == ["ids", "mask", "side"]
    made = assemble(layout, [Slice(feed, 0, feed.rows)], 4 if shapes == "fixed" else 0)
    (found,) = take_apart(layout, model(made.feeds), made.rows, [Slice(feed, 0, feed.rows)])
    assert set(found) == set(outputs or ["kept", "total", "turned"])


@pytest.mark.parametrize("threads", [0, 3])
def test_large_parts_are_copied_by_several_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution._copiers, "count", threads)
    parts = [np.full((rows, 70_000), number, np.float32) for number, rows in enumerate((1, 3, 2, 1, 1, 2))]
    made = np.empty((10, 70_000), np.float32)
    stops = np.cumsum([len(part) for part in parts])
    places = [((slice(stop - len(part), stop),), part) for stop, part in zip(stops, parts, strict=True)]
    execution.copy_parts(made, places)
    assert np.array_equal(made, np.concatenate(parts))
    with pytest.raises(ValueError, match="broadcast"):
        execution.copy_parts(made, [*places, ((slice(0, 2),), parts[1])])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "S3", "datetime64[s]"])
def test_parts_of_any_type_and_layout_are_copied(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")
    monkeypatch.setattr(execution._copiers, "count", 1)
    values = np.arange(3 * 8 * 100_000) % 5
    rows = values.reshape(3, 8, -1).astype(dtype)
    made = np.empty_like(rows)
    execution.copy_parts(made, [((slice(None), slice(0, 3)), rows[:, :3]), ((slice(None), slice(3, 8)), rows[:, 3:])])
    assert np.array_equal(made, rows)
    made = np.empty_like(rows)
    execution.copy_parts(made, [((slice(at, at + 1),), np.asfortranarray(rows[at : at + 1])) for at in range(3)])
    assert np.array_equal(made, rows)


def test_arrays_are_copied_only_into_as_many_bytes() -> None:
    array = np.zeros(4, np.float32)
    with pytest.raises(InputError, match="target 0 has 16 bytes, and its source 12"):
        _core.copy_arrays([array], [array[:3]])
    with pytest.raises(InputError, match="1 targets and 0 sources"):
        _core.copy_arrays([array], [])
    with pytest.raises(ValueError, match="contiguous"):
        _core.copy_arrays([array[::2]], [array[:2]])
    with pytest.raises(ValueError, match="read-only"):
        _core.copy_arrays([np.broadcast_to(array, (1, 4))[0]], [array])


Serve = "Callable[..., Models]"
PAD = {"ids": {"value": 0, "to": [4, 8]}, "mask": {"value": 0, "to": [4, 8]}}


@pytest.fixture
def tokens_path(tmp_path: Path) -> Path:
    return models.save(tokens(), tmp_path, "tokens.onnx")


def sequence(length: int, rows: int = 1) -> dict[str, np.ndarray]:
    ids = np.arange(1, rows * length + 1, dtype=np.int64).reshape(rows, length)
    return {"ids": ids, "mask": np.ones_like(ids)}


@pytest.mark.parametrize(
    ("shapes", "pad", "seen"),
    [
        ("exact", None, [(1, 2), (1, 3), (1, 6)]),
        ("bucket", PAD, [(1, 8), (2, 4)]),
        ("pad", {name: {"value": 0} for name in PAD}, [(3, 6)]),
        ("fixed", PAD, [(4, 8)]),
    ],
)
def test_lengths(tokens_path: Path, serve: Serve, shapes: str, pad: Any, seen: list) -> None:
    gate = Gate()
    engine = FaultyEngine(gate)
    engine.armed = False
    batching = {"max_batch_size": 4, "shapes": shapes, **({"pad": pad} if pad else {})}
    service = serve({"t": {"source": str(tokens_path), "batching": batching}}, registry=engine.registry())
    assert service.ready() == (True, "")
    engine.armed = True
    first = service.infer(ask("t", sequence(1)))
    assert gate.come.wait(WAIT)
    lengths = (2, 3, 6)
    futures = [service.infer(ask("t", sequence(n), parameters={"xrt_evidence": True})) for n in lengths]
    gate.open.set()
    assert first.result(WAIT).outputs[1].data.tolist() == [1.0]
    for n, future in zip(lengths, futures, strict=True):
        response = future.result(WAIT)
        outputs = {output.name: output.data for output in response.outputs}
        assert outputs["tokens"].tolist() == [list(range(1, n + 1))], "outputs are cut back"
        assert outputs["total"].tolist() == [n * (n + 1) / 2]
        assert (response.parameters["xrt_padded"] > 0) is (shapes != "exact")
    assert sorted(one["ids"] for one in engine.seen[1:]) == sorted(seen)
    share = service.evidence("t", "evidence")["padding_share"]
    assert (share > 0) is (shapes != "exact")
    if shapes != "exact":
        with pytest.raises(ServingError, match="at most 8 are served") if "to" in pad["ids"] else _nothing():
            service.infer(ask("t", sequence(9))).result(WAIT)


class _nothing:  # noqa: N801 - a context
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_a_mask_that_a_request_lacks_is_made(tokens_path: Path, serve: Serve) -> None:
    pad = {"ids": {"to": [8], "value": 5, "mask": "mask"}, "mask": {"to": [8], "value": 0}}
    batching = {"max_batch_size": 4, "shapes": "bucket", "pad": pad}
    service = serve({"t": {"source": str(tokens_path), "batching": batching}})
    ids = sequence(3)["ids"]
    outputs = service.infer(ask("t", {"ids": ids})).result(WAIT).outputs
    assert outputs[0].data.tolist() == [[1, 2, 3]]
    assert outputs[1].data.tolist() == [6]


@pytest.mark.parametrize(
    ("pad", "said"),
    [
        ({"ids": {"to": [4]}}, "'mask' has too, and there is no rule for it"),
        ({"ids": {"to": [4]}, "mask": {"to": [8]}}, "have different sizes"),
        ({"idz": {"to": [4]}}, "the model has no input 'idz'"),
        ({"ids": {"to": [4], "axis": 0}, "mask": {"to": [4]}}, "0 is no free dimension"),
        ({"ids": {"to": [4], "value": 0.5}, "mask": {"to": [4]}}, "0.5 is no value of int64"),
    ],
)
def test_rules_that_do_not_fit_the_model(tokens_path: Path, serve: Serve, pad: Any, said: str) -> None:
    batching = {"max_batch_size": 4, "shapes": "bucket", "pad": pad}
    service = serve({"t": {"source": str(tokens_path), "batching": batching}})
    good, reason = service.ready()
    assert not good
    assert said in reason
    with pytest.raises(ServingError, match="is not served"):
        service.infer(ask("t", sequence(3)))
