# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Requested, resolved, observed: planted deviations are caught, and nothing unseen is called honoured."""

from __future__ import annotations

import pytest
from evidence_records import control, unit

from xpuruntime.evidence import observations
from xpuruntime.evidence.records import Control, KeySeen
from xpuruntime.evidence.render_text.changes import outside_text
from xpuruntime.evidence.report_building import coverage_note, instrumented, profiler_overhead_note


def one(key, controls=(), effective=None, units=(), **keywords):
    found = observations(controls, effective or {}, units, **keywords)
    return next(o for o in found if o.key == key)


def test_everything_as_asked():
    found = observations(
        [control("execution.precision", "fp32")],
        {},
        [unit("a"), unit("b")],
        engine="onnxruntime",
        device="cpu",
        precision="fp32",
    )
    assert [(o.key, o.status) for o in found] == [
        ("execution.engine", "honoured"),
        ("execution.device", "honoured"),
        ("execution.precision", "honoured"),
    ]
    assert found[2].observed == "fp32 (2 of 2 units)"


def test_engine_device_and_precision_are_compared_even_when_the_policy_is_silent():
    found = observations((), {}, [unit("a", device="cpu")], engine="onnxruntime", device="cuda:0", precision="model")
    assert [(o.key, o.requested, o.status) for o in found] == [
        ("execution.engine", "auto", "honoured"),
        ("execution.device", "auto", "substituted"),
        ("execution.precision", "model", "honoured"),
    ]


def test_a_node_on_the_cpu_of_a_cuda_session():
    units = [*(unit(f"n{i}", device="cuda:0") for i in range(5)), unit("nms", op="NonMaxSuppression")]
    found = one("execution.device", [control("execution.device", "cuda:0")], units=units, device="cuda:0")
    assert found.status == "substituted"
    assert found.observed == "cuda:0 (5 of 6 units), cpu (1 of 6 units)"
    assert "'nms' (NonMaxSuppression" in found.reason


def test_a_permitted_cpu_operator():
    units = [unit("a", device="cuda:0"), unit("nms", op="NonMaxSuppression", status="substituted")]
    keys = [control("execution.allow_cpu_ops", "NonMaxSuppression")]
    for key in ("execution.device", "execution.allow_cpu_ops"):
        found = one(key, keys, units=units, device="cuda:0", allow_cpu_ops=("NonMaxSuppression",))
        assert found.status == "honoured", found
    units.append(unit("det", op="Det", status="substituted"))
    for key in ("execution.device", "execution.allow_cpu_ops"):
        found = one(key, keys, units=units, device="cuda:0", allow_cpu_ops=("NonMaxSuppression",))
        assert found.status == "substituted"
        assert "det" in found.reason


def test_permission_is_for_the_cpu_only():
    units = [unit("a", op="Det", device="cuda:1")]
    assert one("execution.device", units=units, device="cuda:0", allow_cpu_ops=("Det",)).status == "substituted"


def test_inserted_and_folded_units_have_no_device_of_their_own():
    units = [
        unit("a", device="cuda:0"),
        unit("cast", op="Cast", relation="inserted"),
        unit("f", relation="folded", device="none", time=None),
        unit("idle", device="cpu", time=None, status="unobservable"),
    ]
    assert one("execution.device", units=units, device="cuda:0").observed == "cuda:0 (1 of 1 units)"


def test_another_precision():
    units = [
        unit("a", asked="fp16", ran="fp16"),
        unit("b", asked="fp16", ran="fp32"),
        unit("cast", op="Cast", relation="inserted", asked=None, ran="fp16->fp32"),
    ]
    found = one("execution.precision", [control("execution.precision", "fp16")], units=units, precision="fp16")
    assert found.status == "substituted"
    assert found.observed == "fp16 (1 of 2 units), fp32 (1 of 2 units)"
    assert "'b' (MatMul, cpu, fp32)" in found.reason
    assert "1 casts" in found.reason


@pytest.mark.parametrize(("asked", "ran"), [("int8", "uint8"), ("int8", "int8"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_precisions_that_are_alike(asked, ran):
    found = one("execution.precision", units=[unit("a", asked=asked, ran=ran)], precision=asked)
    assert found.status == "honoured"


def test_units_that_int8_was_not_asked_of_are_not_said_to_have_run_in_it():
    units = [unit("a", asked="int8", ran="int8"), unit("b", asked="fp32", ran="fp32")]
    found = one("execution.precision", units=units, precision="int8")
    assert found.status == "honoured"
    assert found.reason == "every unit of which int8 was asked ran in it; 1 others ran in the types of the graph"
    assert one("execution.precision", units=units[:1], precision="int8").reason == "every unit ran in int8"


def test_tf32_cannot_be_seen():
    units = [unit("a", asked="fp32", ran="fp32")]
    assert one("execution.precision", units=units, precision="tf32").status == "unobservable"
    assert one("execution.tf32", [control("execution.tf32", "true")], units=units).status == "unobservable"
    units = [unit("a", asked="fp32", ran="fp16")]
    assert one("execution.precision", units=units, precision="tf32").status == "substituted"


def test_a_cpu_has_no_tf32():
    units = [unit("a")]
    for device, status in (("cpu", "honoured"), ("cuda:0", "unobservable")):
        found = one("execution.tf32", [control("execution.tf32", "false")], units=units, device=device)
        assert found.status == status, found


def test_fp32_is_not_kept_while_tf32_is_allowed():
    units = [unit("a", asked="fp32", ran="fp32")]
    found = one("execution.precision", (), {"execution.tf32": "use_tf32=1"}, units, precision="fp32")
    assert (found.status, "use_tf32=1" in found.reason) == ("substituted", True)
    found = one("execution.precision", (), {"execution.tf32": "use_tf32=0"}, units, precision="fp32")
    assert found.status == "honoured"
    off = [control("execution.tf32", "false", "use_tf32=0")]
    for held, status in (("use_tf32=0", "honoured"), ("use_tf32=1", "substituted")):
        assert one("execution.tf32", off, {"execution.tf32": held}, units).status == status


def test_a_unit_that_does_not_say_its_precision():
    units = [unit("a"), unit("b", ran=None)]
    found = one("execution.precision", units=units, precision="fp32")
    assert found.status == "unobservable"
    assert "'b'" in found.reason


def test_layout():
    units = [unit("a", op="Conv", layout="nhwc"), unit("b", op="Conv", layout="nchw"), unit("c")]
    found = one("execution.layout", [control("execution.layout", "nhwc")], units=units)
    assert (found.status, found.observed) == ("substituted", "nhwc (1 of 2 units), nchw (1 of 2 units)")
    assert one("execution.layout", [control("execution.layout", "auto")], units=units).status == "honoured"
    assert one("execution.layout", [control("execution.layout", "nchw")], units=units[1:]).status == "honoured"
    assert one("execution.layout", [control("execution.layout", "nchw")]).status == "unobservable"


@pytest.mark.parametrize("key", ["kernels.matmul", "kernels.conv", "kernels.attention"])
def test_a_kernel_that_the_engine_does_not_report(key):
    units = [unit("a", op="FusedMatMul"), unit("b", op="Conv"), unit("c", op="GroupQueryAttention")]
    found = one(key, [control(key, "some_kernel", "option=1")], units=units)
    assert found.status == "unobservable"
    assert "does not report which kernel ran (option=1 was set)" in found.reason


def test_a_kernel_of_an_operator_that_did_not_run():
    found = one(
        "kernels.attention", [control("kernels.attention", "flash_v2")], units=[unit("a"), unit("s", "Softmax")]
    )
    assert found.status == "unobservable"
    assert "no attention unit ran" in found.reason


def test_reported_kernels():
    keys = [control("kernels.matmul", "cublas.cublasLt")]
    reported = {"kernel_source": "reported"}
    right = unit("a", kernel="cublasLt_sm90_gemm", **reported)
    wrong = unit("b", kernel="cutlass_gemm", **reported)
    assert one("kernels.matmul", keys, units=[right]).status == "honoured"
    found = one("kernels.matmul", keys, units=[right, wrong])
    assert (found.status, found.observed) == ("substituted", "cublasLt_sm90_gemm, cutlass_gemm")
    assert one("kernels.matmul", keys, units=[right, unit("c")]).status == "unobservable"
    guessed = unit("d", kernel="cublasLt", kernel_source="inferred")
    assert one("kernels.matmul", keys, units=[guessed]).status == "unobservable"


def test_one_of_several_preferred_kernels():
    keys = [control("kernels.attention", "[cudnn, flash_v2]", "sdpa_kernel=9")]
    ran = unit("a", op="GroupQueryAttention", kernel="flash_v2", kernel_source="reported")
    assert one("kernels.attention", keys, {"kernels.attention": "flash_v2"}, [ran]).status == "honoured"
    other = unit("b", op="GroupQueryAttention", kernel="math", kernel_source="reported")
    found = one("kernels.attention", keys, {"kernels.attention": "flash_v2, math"}, [ran, other])
    assert (found.status, found.observed) == ("substituted", "flash_v2, math")
    assert one("kernels.attention", keys, {"kernels.attention": "flash_v2"}).status == "honoured"
    assert one("kernels.attention", keys, {"kernels.attention": "math"}).status == "substituted"


def test_a_setting_that_is_read_back():
    keys = [control("kernels.conv", "cudnn_exhaustive", "cudnn_conv_algo_search=EXHAUSTIVE")]
    for held, status in (("EXHAUSTIVE", "honoured"), ("HEURISTIC", "substituted")):
        effective = {"kernels.conv": f"cudnn_conv_algo_search={held}"}
        assert one("kernels.conv", keys, effective, [unit("c", op="Conv")]).status == status


def test_a_rule_and_a_strategy():
    units = [unit("a", kernel="x", kernel_source="reported")]
    assert one("kernels.rules[0]", [control("kernels.rules[0]", "x")], units=units).status == "unobservable"
    found = one("kernels.rules[0]", [control("kernels.rules[0]", "x")], {"kernels.rules[0]": "x"}, units)
    assert found.status == "honoured"
    assert one("kernels.auto_strategy", [control("kernels.auto_strategy", "best_performance")]).status == "unobservable"


@pytest.mark.parametrize(
    ("requested", "value", "status"),
    [
        ("4", "4", "honoured"),
        ("4", "8", "substituted"),
        ("true", "1", "honoured"),
        ("True", "0", "substituted"),
        ("8589934592", "8589934592.0", "honoured"),
        ("require", "captured", "substituted"),
    ],
)
def test_what_an_engine_reads_back(requested, value, status):
    key = "execution.threads"
    assert one(key, [control(key, requested)], {key: value}, [unit("a")]).status == status


def test_what_the_engine_itself_has_compared():
    """It knows which units a key reached: that counts, whatever their kernels are called."""
    seen = KeySeen(observed="cublas.cublas (1 node)", status="substituted", reason="the kernel cannot serve it")
    units = [unit("mm", kernel="cublas.cublas", kernel_source="reported")]
    pin = control("kernels.matmul", "cpu.blas")
    found = one("kernels.matmul", [pin], units=units, keys={"kernels.matmul": seen})
    assert (found.observed, found.status, found.reason) == (seen.observed, seen.status, seen.reason)
    ignored = control("kernels.matmul", "cpu.blas", enforceability="unsupported", reason="there is no switch")
    found = one("kernels.matmul", [ignored], units=units, keys={"kernels.matmul": seen})
    assert (found.status, found.reason) == ("unsupported", "there is no switch")


def test_what_no_engine_reads_back_is_never_honoured():
    for enforceability in ("enforced", "advisory"):
        found = one("execution.determinism", [control("execution.determinism", "run_to_run", "x=1", enforceability)])
        assert (found.status, found.observed) == ("unobservable", "-")


def test_what_the_plan_said_is_unsupported():
    keys = [control("kernels.matmul", "cublasLt", "-", "unsupported", "this engine has no switch for it")]
    found = one("kernels.matmul", keys, units=[unit("a")])
    assert (found.status, found.reason) == ("unsupported", "this engine has no switch for it")


def test_a_fallback_that_was_not_used():
    keys = [control("execution.fallback", "error")]
    assert one("execution.fallback", keys, units=[unit("a")], engine="onnxruntime").status == "honoured"
    assert one("execution.fallback", keys, units=[unit("a")], engine="openvino").status == "substituted"
    assert one("execution.fallback", keys, engine="onnxruntime").status == "unobservable"


def test_nothing_observed_is_nothing_honoured():
    keys = [control(k, "x") for k in ("execution.tf32", "execution.layout", "kernels.matmul", "execution.threads")]
    found = observations(keys, {}, (), engine="onnxruntime", device="cpu", precision="fp32")
    assert {o.status for o in found} == {"unobservable"}


def test_a_pass_without_units_uses_what_was_read_back():
    effective = {"execution.engine": "x", "execution.device": "cpu", "execution.precision": "bf16"}
    found = observations((), effective, (), engine="x", device="cpu", precision="fp32")
    assert [o.status for o in found] == ["honoured", "honoured", "substituted"]


@pytest.mark.parametrize("level", ["enforced", "advisory"])
def test_a_key_without_subject_in_the_model_is_unobservable(level):
    control = Control(
        key="kernels.conv", requested="cudnn.conv_heuristic", resolved="-", enforceability=level, reason="no conv"
    )
    (seen,) = [
        observation
        for observation in observations([control], {"kernels.conv": "cudnn_exhaustive"}, [])
        if observation.key == "kernels.conv"
    ]
    assert (seen.observed, seen.status, seen.reason) == ("-", "unobservable", "no conv")


def test_the_median_of_the_shares_of_single_runs():
    """One run in which the machine was busy between units does not move the figure."""
    found = instrumented((100.0, 100.0, 9_000.0), (95.0, 97.0, 96.0), 12)
    assert found == {
        "run_us": 100.0,
        "runs": 3,
        "statistic": "median",
        "units_us": 96.0,
        "units": 12,
        "coverage": pytest.approx(0.95),
        "outside_us": 5.0,
    }
    assert coverage_note(found) is None


def test_means_where_only_means_are_known():
    found = instrumented((100.0, 300.0), (180.0,), 3)
    assert (found["statistic"], found["run_us"], found["coverage"]) == ("mean", 200.0, pytest.approx(0.9))


def test_units_without_wall_times_have_no_share():
    assert instrumented((100.0, 120.0, 110.0), (), 0) == {"run_us": 110.0, "runs": 3, "statistic": "median"}
    assert instrumented((100.0,), (50.0,), 0) == {"run_us": 100.0, "runs": 1, "statistic": "median"}
    assert "coverage" not in instrumented((0.0,), (0.0,), 1)
    assert instrumented((), (), 0) == {}
    assert coverage_note({}) is None


@pytest.mark.parametrize(("units", "noted"), [(89.0, True), (91.0, False), (109.0, False), (111.0, True)])
def test_more_than_a_tenth_is_told(units, noted):
    note = coverage_note(instrumented((100.0,), (units,), 10))
    assert (note is not None) is noted


def test_what_was_measured_outside_of_units():
    found = instrumented((100.0,), (60.0,), 8, outside_us={"call": 6.25, "between": 16.0}, cut_us=12.0)
    assert (found["outside_us"], found["outside"], found["cut_us"]) == (40.0, {"call": 6.25, "between": 16.0}, 12.0)
    assert outside_text(found) == "outside of units (call 6.2, between units 16.0, cut off at most 12.0)"
    assert coverage_note(found) == (
        "the units explain 60% of an instrumented run, 60.0 of 100.0 us (median): outside of them, 6.2 us is the call "
        "itself; 16.0 us passes between units, 2.0 for each of 8, in dispatch and the profiler's own work; up to 12.0 "
        "us is cut off, because the engine counts whole microseconds; the rest is whatever else engine and machine did"
    )


def test_what_was_not_measured_outside_of_units_is_not_there():
    found = instrumented((100.0,), (95.0,), 8)
    assert found["outside_us"] == 5.0
    assert not {"outside", "cut_us"} & set(found)
    assert outside_text(found) == "outside of units"
    assert instrumented((100.0,), (120.0,), 8)["outside_us"] == 0.0
    assert "outside_us" not in instrumented((100.0,), (), 0, outside_us={"call": 1.0}, cut_us=1.0)


def test_units_that_took_longer_than_a_run_that_nobody_watched():
    found = instrumented((100.0,), (60.0,), 8)
    assert profiler_overhead_note(found, 55.0) is None
    note = profiler_overhead_note(found, 23.5)
    assert note.startswith("the units together took 60.0 us of an instrumented run")
    assert "at most 23.5" in note
    assert profiler_overhead_note({}, 23.5) is None
