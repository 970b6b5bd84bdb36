# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requests of different lengths and batches of one shape: what runs together, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from serving_models import WAIT, FaultyEngine, Gate, ask, tokens

from xpuruntime.serving.status import ServingError
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path


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
        outputs = {one.name: one.data for one in response.outputs}
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


def test_a_fixed_shape_gives_the_same_bits_whatever_else_is_in_the_batch(tmp_path: Path, serve: Serve) -> None:
    path = models.save(models.mlp(width=96, seed=3), tmp_path, "wide.onnx")
    gate = Gate()
    engine = FaultyEngine(gate)
    engine.armed = False
    service = serve(
        {"m": {"source": str(path), "batching": {"max_batch_size": 8, "shapes": "fixed"}}}, registry=engine.registry()
    )
    assert service.ready() == (True, "")
    x = np.random.default_rng(0).standard_normal((1, 96)).astype(np.float32)
    alone = service.infer(ask("m", {"x": x})).result(WAIT).outputs[0].data.tobytes()
    for others in range(1, 8):
        gate.come.clear(), gate.open.clear()
        engine.armed = True
        first = service.infer(ask("m", {"x": x * 2}))
        assert gate.come.wait(WAIT)
        noise = [np.random.default_rng(i).standard_normal((1, 96)).astype(np.float32) for i in range(others)]
        before = [service.infer(ask("m", {"x": one})) for one in noise[: others // 2]]
        future = service.infer(ask("m", {"x": x}))
        after = [service.infer(ask("m", {"x": one})) for one in noise[others // 2 :]]
        gate.open.set()
        for one in (first, *before, *after):
            one.result(WAIT)
        assert future.result(WAIT).outputs[0].data.tobytes() == alone
        engine.armed = False
    assert {one["x"] for one in engine.seen} == {(8, 96)}
