# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which nodes a policy reaches, what the plan says of it, and what is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from rewriting_models import close, found, graph, normal, present, save, session, stock

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.engines.onnxruntime.rewriting import loading
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.measuring.rounds import KernelTiming, Replacement, replacing
from xpuruntime.measuring.tuning_watch import watch_tuning
from xpuruntime.policies import TuningPolicy

if TYPE_CHECKING:
    from pathlib import Path


def two_layers(dtype: str = "float") -> Any:
    """Two products in modules of their own, with a norm between them."""
    kind = {"float": np.float32, "double": np.float64, "float16": np.float16}[dtype]
    weights = {"w1": normal(6, 8), "w2": normal(8, 6, seed=1), "g": normal(8, seed=2), "b": normal(8, seed=3)}
    model = graph(
        f"{dtype}[n, 6] x", f"{dtype}[n, 6] y",
        "h = MatMul(x, w1)\nm = LayerNormalization(h, g, b)\ny = MatMul(m, w2)",
        {name: value.astype(kind) for name, value in weights.items()},
    )  # fmt: skip
    names = (
        "/encoder/layers.0/up/MatMul",
        "/encoder/layers.0/norm/LayerNormalization",
        "/encoder/layers.1/down/MatMul",
    )
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    return model


def rule(use: Any, **match: Any) -> dict[str, Any]:
    return {"match": match, "use": use}


UP, NORM, DOWN = (node.name for node in two_layers().graph.node)


@pytest.mark.parametrize(
    ("match", "nodes"),
    [
        ({"op": "matmul"}, [UP, DOWN]),
        ({"op": "matmul", "node": "*layers.1*"}, [DOWN]),
        ({"op": "matmul", "module": "encoder.layers.0.*"}, [UP]),
        ({"op": "matmul", "module": "encoder.layers.0"}, []),
        ({"op": "matmul", "n": 8}, [UP]),
        ({"op": "matmul", "k": ">=7"}, [DOWN]),
        ({"op": "matmul", "m": "<=16"}, [UP, DOWN]),
        ({"op": "matmul", "m": "<=16", "n": ">100"}, []),
        ({"op": "matmul", "head_dim": 64}, []),
        ({"op": "matmul", "dtype": "fp32"}, [UP, DOWN]),
        ({"op": "matmul", "dtype": ["fp16", "bf16"]}, []),
        ({"op": "matmul", "device": "cuda"}, []),
        ({"op": "matmul", "device": "cpu"}, [UP, DOWN]),
        ({"op": "matmul", "phase": "infer"}, [UP, DOWN]),
        ({"op": "matmul", "phase": "train"}, []),
        ({"node": "*down*"}, [DOWN]),
    ],
)
def test_whom_a_rule_reaches(match: dict[str, Any], nodes: list[str]) -> None:
    result = found(two_layers(), {"rules": [rule("cpu.blas", **match)]})
    assert [rewrite.node for rewrite in result.rewrites] == nodes


def test_the_first_rule_that_can_hold_wins_and_sizes_are_for_the_run_to_settle() -> None:
    kernels = {
        "matmul": "cpu.blas",
        "rules": [rule("torch.mm", op="matmul", node="*up*"), rule("cpu.reference", op="matmul", m="<=4")],
    }
    result = found(two_layers(), kernels)
    assert [rewrite.node for rewrite in result.rewrites] == [DOWN], (
        "another rule asks no xpuruntime kernel for the first one"
    )
    one = result.rewrites[0]
    assert one.keys == ("kernels.rules[1]", "kernels.matmul")
    assert one.rest == ""
    only_some = found(two_layers(), {"rules": [rule("cpu.reference", op="matmul", m="<=4")]}).rewrites[0]
    assert "sizes that no rule is for" in only_some.rest


def test_each_size_gets_the_kernel_of_its_rule(tmp_path: Path) -> None:
    kernels = {"matmul": "cpu.blas", "rules": [rule("cpu.reference", op="matmul", m="<=4")]}
    model = two_layers()
    with session(model, tmp_path, kernels=kernels) as opened:
        for rows, kernel in ((3, "cpu.reference"), (9, "cpu.blas")):
            x = normal(rows, 6)
            close(opened.run({"x": x})["y"], stock(model, {"x": x})["y"])
            report = opened.explain({"x": x}, runs=1)
            ran = {unit.kernel for unit in report.units if unit.op == "MatMul"}
            assert ran == {kernel}
            status = {
                observation.key: observation.status
                for observation in report.observations
                if observation.key.startswith("kernels.")
            }
            used, unused = ("kernels.rules[0]", "kernels.matmul")[:: 1 if rows == 3 else -1]
            assert status[used] == "honoured"
            assert status[unused] == "unobservable"


def test_a_module_rule_holds_when_it_runs(tmp_path: Path) -> None:
    kernels = {"matmul": "cpu.blas", "rules": [rule("cpu.reference", op="matmul", module="*.layers.1.*")]}
    with session(two_layers(), tmp_path, kernels=kernels) as opened:
        report = opened.explain({"x": normal(3, 6)}, runs=1)
    assert {unit.id: unit.kernel for unit in report.units if unit.op == "MatMul"} == {
        UP: "cpu.blas",
        DOWN: "cpu.reference",
    }
    assert all(
        observation.status == "honoured"
        for observation in report.observations
        if observation.key.startswith("kernels.")
    )


def test_the_plan_lists_what_it_rewrites(tmp_path: Path) -> None:
    path = save(two_layers(), tmp_path)
    plan = xrt.plan(path, engine="onnxruntime", device="cpu", policy={"kernels": present(path), "mode": "strict"})
    assert plan.settings["rewrites"][UP] == "xpuruntime.MatMul by cpu.blas (kernels.matmul)"
    assert f"rewrites.{NORM}: xpuruntime.LayerNormalization by cpu.vectorised" in str(plan)
    control = plan.control("kernels.matmul")
    assert control is not None
    assert (control.enforceability, control.resolved) == ("enforced", "2 nodes as xpuruntime.MatMul")
    again = xrt.plan(path, engine="onnxruntime", device="cpu", policy={"kernels": present(path), "mode": "strict"})
    assert (again.request_hash, again.execution_hash) == (plan.request_hash, plan.execution_hash)


def test_a_word_that_leaves_the_choice_rewrites_nothing(tmp_path: Path) -> None:
    path = save(two_layers(), tmp_path)
    plan = xrt.plan(path, engine="onnxruntime", device="cpu", policy={"kernels": {"matmul": "auto"}, "mode": "strict"})
    assert plan.settings["rewrites"] == {}
    assert plan.control("kernels.matmul").enforceability == "enforced"  # type: ignore[union-attr]


def test_auto_last_lets_onnx_runtime_do_what_the_kernel_cannot(tmp_path: Path) -> None:
    path = save(two_layers("float16"), tmp_path)
    policy = {"kernels": {"matmul": ["cpu.blas", "auto"]}, "mode": "strict"}
    with xrt.InferenceSession(path, engine="onnxruntime", device="cpu", policy=policy) as opened:
        assert opened.plan.settings["rewrites"] == {}
        opened.run({"x": normal(2, 6, dtype=np.float16)})


def test_strict_refuses_what_cannot_be_enforced(tmp_path: Path) -> None:
    path = save(two_layers("float16"), tmp_path)
    policy = {"kernels": {"matmul": "cpu.blas"}, "mode": "strict"}
    with pytest.raises(xrt.UnsupportedOperationError, match="OpenBLAS multiplies fp32 and fp64") as refused:
        xrt.InferenceSession(path, engine="onnxruntime", device="cpu", policy=policy)
    assert UP in str(refused.value)


def test_prefer_warns_and_runs(tmp_path: Path) -> None:
    model = two_layers("float16")
    x = normal(2, 6, dtype=np.float16)
    with pytest.warns(xrt.XpuRuntimeWarning, match=r"kernels\.matmul"):
        opened = session(model, tmp_path, kernels={"matmul": "cpu.blas"}, mode="prefer")
    with opened:
        assert np.array_equal(opened.run({"x": x})["y"], stock(model, {"x": x})["y"])
        assert opened.plan.settings["left"].keys() == {UP, DOWN}


def test_a_key_whose_nodes_all_have_rules_is_met(tmp_path: Path) -> None:
    kernels = {"matmul": "cpu.blas", "rules": [rule("cpu.reference", op="matmul")]}
    with session(two_layers(), tmp_path, kernels=kernels) as opened:
        control = opened.plan.control("kernels.matmul")
        assert control is not None
        assert control.reason == "other rules hold for every node: nothing to choose"


@pytest.mark.parametrize("stated", [{"dtype": "bf16"}, {"phase": "train"}])
def test_a_rule_whose_conditions_hold_for_no_node_says_so(stated: dict[str, str], tmp_path: Path) -> None:
    kernels = {"matmul": "cpu.blas", "rules": [rule("cpu.reference", op="matmul", **stated)]}
    with session(two_layers(), tmp_path, kernels=kernels, mode="strict") as opened:
        seen = {observation.key: observation for observation in opened.explain(runs=1).observations}
    assert seen["kernels.matmul"].status == "honoured"
    ((name, value),) = stated.items()
    reason = f"no node of the model is one that the rule is for, which states op: matmul, {name}: {value}"
    assert (seen["kernels.rules[0]"].status, seen["kernels.rules[0]"].reason) == ("unobservable", reason)


def test_a_rule_of_a_module_that_the_model_lacks_is_not_enforced(tmp_path: Path) -> None:
    kernels = {"rules": [rule("cpu.blas", op="matmul", module="layers.9.*")]}
    with pytest.raises(xrt.UnsupportedOperationError, match=r"kernels\.rules\[0\]"):
        session(two_layers(), tmp_path, kernels=kernels, mode="strict")
    with (
        pytest.warns(xrt.XpuRuntimeWarning, match="no node of the model is one that the rule is for, which states"),
        session(two_layers(), tmp_path, kernels=kernels, mode="prefer") as opened,
    ):
        control = opened.plan.control("kernels.rules[0]")
    assert control is not None
    assert control.enforceability == "advisory"


def test_a_rule_that_states_a_size_of_another_operation_is_not_enforced(tmp_path: Path) -> None:
    kernels = {"rules": [rule("cpu.blas", op="matmul", kv="<=64")]}
    with pytest.raises(xrt.UnsupportedOperationError, match=r"kernels\.rules\[0\].*leave kv out"):
        session(two_layers(), tmp_path, kernels=kernels, mode="strict")


def test_a_converted_graph_is_rewritten_after_the_conversion(tmp_path: Path) -> None:
    """Kernels that serve fp16 on the CPU: only the reference."""
    kernels = {"matmul": "cpu.reference", "layer_norm": "cpu.vectorised"}
    model = two_layers()
    with pytest.warns(xrt.XpuRuntimeWarning, match=r"execution\.precision"):
        opened = session(
            model, tmp_path, kernels=kernels, mode="prefer", execution={"precision": "fp16", "device": "cpu"}
        )
    with opened:
        assert opened.plan.settings["rewrites"].keys() == {UP, NORM, DOWN}
        x = normal(3, 6)
        report = opened.explain({"x": x}, runs=1)
        assert {unit.precision_run for unit in report.units if unit.kernel} == {"fp16"}
        close(opened.run({"x": x})["y"], stock(model, {"x": x})["y"], rtol=5e-3)


def test_a_plan_that_the_loaded_graph_does_not_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan was made for another graph than is loaded: strict refuses, prefer says so."""
    from xpuruntime.engines.onnxruntime.rewriting import graph_edit
    from xpuruntime.engines.onnxruntime.rewriting import rules as records

    real = graph_edit._find

    def fewer(*args: Any, **given: Any) -> records.FoundRewrites:
        result = real(*args, **given)
        kept = tuple(rewrite for rewrite in result.rewrites if rewrite.node != UP)
        return msgspec.structs.replace(result, rewrites=kept)

    monkeypatch.setattr(graph_edit, "_find", fewer)
    with pytest.raises(xrt.EngineError, match=UP):
        session(two_layers(), tmp_path)
    with session(two_layers(), tmp_path, mode="prefer") as opened:
        report = opened.explain({"x": normal(2, 6)}, runs=1)
    assert any(UP in conversion.what and "other than planned" in conversion.what for conversion in report.conversions)


def test_threads_of_the_policy_are_not_those_of_our_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(two_layers(), tmp_path)
    policy = {"kernels": {"matmul": "cpu.blas"}, "execution": {"threads": 1, "device": "cpu"}}
    monkeypatch.setenv("XPURUNTIME_CPU_THREADS", "1")
    plan = xrt.plan(path, engine="onnxruntime", policy=policy)
    assert plan.control("execution.threads").enforceability == "enforced"  # type: ignore[union-attr]
    monkeypatch.delenv("XPURUNTIME_CPU_THREADS")
    with pytest.warns(xrt.XpuRuntimeWarning, match="XPURUNTIME_CPU_THREADS=1"):
        opened = xrt.InferenceSession(path, engine="onnxruntime", policy=policy)
    with opened:
        report = opened.explain({"x": normal(2, 6)}, runs=1)
    seen = next(observation for observation in report.observations if observation.key == "execution.threads")
    assert seen.status == "substituted"


# Tuning


def fixed() -> Any:
    weights = {"w1": normal(64, 96), "w2": normal(96, 64, seed=1), "g": normal(96), "b": normal(96)}
    body = "h = MatMul(x, w1)\nm = LayerNormalization(h, g, b)\ny = MatMul(m, w2)"
    return graph("float[8, 64] x", "float[8, 64] y", body, weights)


def took(one: loading.Timed, ours: float) -> Replacement:
    """What is measured where ONNX Runtime's own kernel takes 10 us."""
    verdict = "faster" if ours < 9.8 else "not_faster"
    other = KernelTiming(f"xpuruntime.{one.rewrite.op}", "", ours, ours / 10, ours / 10, ours / 10, verdict)
    return replacing([KernelTiming(loading.STOCK, "", 10.0), other], rounds=11, seconds=3.0)


def test_what_is_faster_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loading.measure_free

    def timed(model: Any, free: Any, *args: Any, **given: Any) -> list[loading.Timed]:
        times = real(model, free, *args, **given)
        assert all(timing.replacement and timing.stock > 0 and timing.xpuruntime > 0 for timing in times), [
            str(timing) for timing in times
        ]
        return [
            timing._replace(replacement=took(timing, 9.9 if timing.rewrite.node == "MatMul_y" else 5.0))
            for timing in times
        ]

    monkeypatch.setattr(loading, "measure_free", timed)
    model, x = fixed(), normal(8, 64)
    with session(model, tmp_path, kernels={}, auto_strategy="best_performance") as opened:
        control = opened.plan.control("kernels.auto_strategy") or opened.plan.control("auto_strategy")
        assert control is not None
        assert (control.enforceability, control.resolved) == ("enforced", "3 nodes measured at load")
        report = opened.explain({"x": x}, runs=1)
        close(opened.run({"x": x})["y"], stock(model, {"x": x})["y"])
    ours = {unit.id for unit in report.units if unit.kernel}
    assert ours == {"MatMul_h", "LayerNormalization_m"}, "1 % is not enough"
    lines = [f"{conversion.what}: {conversion.reason}" for conversion in report.conversions]
    assert any("'MatMul_y'" in line and "ONNX Runtime's own stays" in line for line in lines)
    assert any("'MatMul_h'" in line and "5.0 us by xpuruntime" in line for line in lines)


def test_what_is_pinned_is_not_measured(tmp_path: Path) -> None:
    with session(fixed(), tmp_path, kernels={"matmul": "cpu.blas"}, auto_strategy="best_performance") as opened:
        report = opened.explain(runs=1)
    measured = [conversion.what for conversion in report.conversions if "was measured" in conversion.what]
    assert len(measured) == 1
    assert "LayerNormalization_m" in measured[0]
    assert {unit.kernel for unit in report.units if unit.op == "MatMul"} == {"cpu.blas"}


def test_memory_is_no_objective_here(tmp_path: Path) -> None:
    tuning = {"objective": "memory"}
    with pytest.raises(UnsupportedOperationError, match=r"times alone.*objective: time"):
        session(fixed(), tmp_path, mode="strict", kernels={}, auto_strategy="best_performance", tuning=tuning)


def test_sizes_that_are_open_are_not_measured(tmp_path: Path) -> None:
    with session(two_layers(), tmp_path, kernels={}, auto_strategy="best_performance") as opened:
        report = opened.explain({"x": normal(2, 6)}, runs=1)
    reasons = [conversion.reason for conversion in report.conversions if "was measured" in conversion.what]
    assert reasons
    assert all("not measured" in reason and "execution.shapes" in reason for reason in reasons)
    assert not [unit for unit in report.units if unit.kernel]


@pytest.mark.usefixtures("own_tuning_cache")
def test_equal_operations_are_measured_once_and_not_again() -> None:
    weights = {f"w{i}": normal(64, 64, seed=i) for i in range(4)}
    body = "\n".join(f"t{i} = MatMul({'x' if i == 0 else f't{i - 1}'}, w{i})" for i in range(4))
    model = graph("float[8, 64] x", "float[8, 64] t3", body, weights)
    from xpuruntime.engines.onnxruntime.rewriting.graph import Terms
    from xpuruntime.engines.onnxruntime.rewriting.graph_edit import find_rewrites
    from xpuruntime.engines.onnxruntime.rewriting.rules import RuleQuery

    free = find_rewrites(model, RuleQuery(xrt.KernelPolicy(), "cpu", None), Terms("cpu"), tune=True).free
    opened: list[bytes] = []

    def count(part: bytes) -> Any:
        opened.append(part)
        return lambda: None

    def measure(place: str = "cpu;here", **more: Any) -> list[loading.Timed]:
        rule = TuningPolicy(budget=0.1)
        given = {"deterministic": False, "rule": rule, "place": place, "versions": {"onnxruntime": "1"}, **more}
        return loading.measure_free(model, free, "rules", count, **given)

    times = measure()
    assert len(times) == 4
    assert len(opened) == 2
    assert {time_.rewrite.node for time_ in times} == {f"MatMul_t{i}" for i in range(4)}
    assert [one.replacement for one in measure()] == [time_.replacement for time_ in times]
    assert len(opened) == 2, "what was measured is replayed"
    measure(place="cpu;another machine")
    measure(versions={"onnxruntime": "2"})
    assert len(opened) == 6
    with watch_tuning(cancel=lambda: True):
        ended = measure(place="cpu;a third")
    assert all("cancelled" in str(one) and not one.wins for one in ended)
    assert len(measure(place="cpu;a third")) == 4
    assert len(opened) == 8, "what was cancelled is neither opened nor kept"


# CUDA, where a plan needs no device


@pytest.mark.needs_build("cudnn")
def test_on_cuda_families_are_options_and_ids_are_kernels_of_ours() -> None:
    inputs = "float16[b, 2, s, 64] q, float16[b, 2, s, 64] k, float16[b, 2, s, 64] v"
    body = "kt = Transpose<perm=[0,1,3,2]>(k)\np = MatMul(q, kt)\nw = Softmax(p)\ny = MatMul(w, v)"
    model = graph(inputs, "float16[b, 2, s, 64] y", body)
    for words, count in (
        ("flash_v2", 0),
        ("cudnn.sdpa", 1),
        ("cuda_raw.flash_attention_v2", 1),
        (["flash_v2", "cudnn.sdpa"], 0),
        (["cuda_raw", "flash_v2"], 1),
    ):
        assert len(found(model, {"attention": words}, device="cuda:0").rewrites) == count, words


def test_a_backend_that_is_not_in_the_build_is_named(tmp_path: Path) -> None:
    missing = [word for word in ("cublas.cublasLt", "cudnn.sdpa", "cuda_raw") if _core.why_not_built(word)]
    for word in missing:
        op = "attention" if word == "cudnn.sdpa" else "matmul"
        policy = {"kernels": {"rules": [rule(word, op=op)]}}
        control = xrt.plan(save(two_layers(), tmp_path), engine="onnxruntime", device="cpu", policy=policy).control(
            "kernels.rules[0]"
        )
        assert control is not None
        assert control.enforceability == "unsupported"
        assert f"the backend {word.split('.')[0]} is not in this build" in control.reason
        assert "xrt doctor" in (control.fix or "")
    assert not _core.why_not_built("cpu.blas")
    assert not _core.why_not_built("flash_v2")


@pytest.mark.needs_build("cuda")
def test_on_cuda_a_skinny_product_is_rewritten_for_the_sizes_it_serves() -> None:
    model = graph(
        "float16[n, 256] x", "float16[n, 512] y", "y = MatMul(x, w)", {"w": normal(256, 512, dtype=np.float16)}
    )
    kernels = {"rules": [rule("cuda_raw.skinny", op="matmul", m="<=16", dtype="fp16")]}
    rewrite = found(model, kernels, device="cuda:0").rewrites[0]
    assert rewrite.words == ("cuda_raw.skinny",)
    assert rewrite.rest
    wide = graph(
        "float16[4096, 256] x", "float16[a, b] y", "y = MatMul(x, w)", {"w": normal(256, 512, dtype=np.float16)}
    )
    assert not found(wide, kernels, device="cuda:0").rewrites, "no run can have 16 rows"
