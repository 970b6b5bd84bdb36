# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which models are evicted for another one, and which are not where that would not help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from serving_models import WAIT, ask

from xpuruntime.runtime.cpu_and_memory import process_memory
from xpuruntime.serving.models.loading import MemoryBudget
from xpuruntime.serving.models.settings import MemorySettings
from xpuruntime.serving.status import ServingError, Status

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(eq=False)
class Model:
    """A model that is unloaded when it is asked to, unless it is in use."""

    name: str
    last_used: float = 0.0
    in_use: bool = False
    loaded: bool = True

    def try_evict(self) -> bool:
        self.loaded = self.loaded and self.in_use
        return not self.loaded


def budget(limit: int, *models: Model, **settings: Any) -> MemoryBudget:
    made = MemoryBudget(MemorySettings(budget={"cpu": limit}, **settings))
    for model in models:
        made.hold(model, "cpu", 40)
    return made


def test_the_least_recently_used_goes_first() -> None:
    old, new = Model("old", 1.0), Model("new", 2.0)
    made = budget(100, new, old)
    made.hold(Model("next"), "cpu", 50)
    assert (old.loaded, new.loaded) == (False, True)
    assert made.used() == {"cpu": 90}
    assert made.evictions == 1


@pytest.mark.parametrize(("size", "settings"), [(101, {}), (61, {"keep": "one"}), (61, {"evict": "none"})])
def test_none_goes_for_a_model_that_does_not_fit_anyway(size: int, settings: dict[str, Any]) -> None:
    one, two = Model("one"), Model("two")
    made = budget(100, one, two, **settings)
    with pytest.raises(ServingError, match=r"whose budget is .* Fix: raise memory\.budget") as refused:
        made.hold(Model("large"), "cpu", size)
    assert refused.value.code is Status.RESOURCE_EXHAUSTED
    assert one.loaded
    assert two.loaded
    assert made.used() == {"cpu": 80}


def test_the_refusal_names_the_others_and_not_the_model_itself() -> None:
    one, two = Model("one"), Model("two")
    made = budget(100, one, two, keep="two")
    with pytest.raises(ServingError, match=r"'one' takes 2\.5MiB on cpu, .* can go now: two 0\.0MiB \(kept\)\. Fix"):
        made.hold(one, "cpu", 5 << 19)
    assert made.used() == {"cpu": 80}


def test_an_engine_gives_back_what_one_large_execution_took(serve: Any, tmp_path: Path) -> None:
    tensors = [("v", TensorProto.FLOAT, [1]), ("shape", TensorProto.INT64, [2]), ("y", TensorProto.FLOAT, ["A", "B"])]
    value, shape, output = (helper.make_tensor_value_info(*one) for one in tensors)
    graph = helper.make_graph([helper.make_node("Expand", ["v", "shape"], ["y"])], "expand", [value, shape], [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "expand.onnx")
    service = serve({"expand": {"source": str(tmp_path / "expand.onnx")}}, memory={"budget": {"cpu": "300MiB"}})

    def expand(*sizes: int) -> None:
        inputs = {"v": np.ones(1, np.float32), "shape": np.array(sizes, np.int64)}
        service.infer(ask("expand", inputs)).result(WAIT)

    expand(1, 1)
    before = process_memory().resident
    if before is None:
        pytest.skip("this system does not say how much memory a process has")
    expand(10_000, 8_000)  # 305 MiB
    for _ in range(16):
        expand(1, 1)
    after = process_memory().resident
    assert after is not None
    assert after - before < 150 << 20


def test_a_model_in_use_stays() -> None:
    one, two = Model("one", 1.0, in_use=True), Model("two", 2.0)
    made = budget(100, one, two)
    made.hold(Model("next"), "cpu", 50)
    assert (one.loaded, two.loaded) == (True, False)


def test_a_model_that_is_refused_more_keeps_what_it_had() -> None:
    one = Model("one")
    made = budget(100, one)
    with pytest.raises(ServingError):
        made.hold(one, "cpu", 101)
    assert made.used() == {"cpu": 40}
