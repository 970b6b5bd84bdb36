# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Policies as Python values: frozen, hashable, checked when made."""

from __future__ import annotations

import copy
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest

from xpuruntime.errors import PolicyError
from xpuruntime.policies import (
    AccuracyPolicy,
    ArtifactPolicy,
    DeviceSpec,
    ExecutionPolicy,
    KernelPolicy,
    KernelRule,
    MemoryPolicy,
    Policy,
    RuleMatch,
    WeightsPolicy,
)


def test_defaults():
    execution = ExecutionPolicy()
    assert {name: getattr(execution, name) for name in ExecutionPolicy.KINDS} == {
        "engine": "auto",
        "device": "auto",
        "precision": "model",
        "fallback": "error",
        "allow_cpu_ops": (),
        "static_shape": False,
        "static_batch": None,
        "shapes": {},
        "cuda_graph": "off",
        "memory": MemoryPolicy(pool="engine", limit=None),
        "artifacts": ArtifactPolicy(cache="off", stale="error"),
        "determinism": "none",
        "tf32": None,
        "weights": WeightsPolicy(),
        "layout": "auto",
        "threads": None,
        "lock": None,
        "provider_options": {},
    }
    assert Policy() == Policy(mode="prefer", execution=execution, kernels=KernelPolicy(), accuracy=None)
    assert KernelPolicy().auto_strategy == "first_supported"


@pytest.mark.parametrize(
    "cls",
    [
        AccuracyPolicy,
        ArtifactPolicy,
        DeviceSpec,
        ExecutionPolicy,
        KernelPolicy,
        KernelRule,
        MemoryPolicy,
        Policy,
        RuleMatch,
        WeightsPolicy,
    ],
)
def test_every_field_has_a_kind_and_the_other_way_round(cls):
    assert tuple(cls.KINDS) == cls.__struct_fields__


def test_frozen(full_policy):
    with pytest.raises(AttributeError):
        full_policy.mode = "auto"
    options = full_policy.execution.provider_options
    for change in (
        lambda: options.__setitem__("x", {}),
        lambda: options.update(x={}),
        lambda: options.__ior__({"x": {}}),
        lambda: options["onnxruntime"].__setitem__("x", 2),
        lambda: options["onnxruntime"].pop("x"),
        options.clear,
        options.popitem,
        lambda: options.setdefault("y", {}),
        lambda: options.__delitem__("onnxruntime"),
    ):
        with pytest.raises(TypeError, match="frozen"):
            change()
    mine = dict(options["onnxruntime"])
    mine["x"] = 2
    assert options["onnxruntime"]["x"] == 1


def test_what_was_given_may_change_afterwards():
    engines, inner = ["a"], {"x": 1}
    given = {"ort": inner}
    policy = ExecutionPolicy(engine=engines, provider_options=given)
    engines.append("b")
    inner["x"] = 2
    given["other"] = {"y": 1}
    assert policy == ExecutionPolicy(engine=["a"], provider_options={"ort": {"x": 1}})


def test_equal_values_are_one_key(full_policy):
    other = copy.deepcopy(full_policy)
    assert {full_policy: 1}[other] == 1
    ordered = ExecutionPolicy(provider_options={"b": {"y": 1, "x": 2}, "a": {"z": 3}, "empty": {}})
    sorted_ = ExecutionPolicy(provider_options={"a": {"z": 3}, "b": {"x": 2, "y": 1}})
    assert (ordered, hash(ordered), repr(ordered)) == (sorted_, hash(sorted_), repr(sorted_))
    assert full_policy != full_policy.replace(mode="auto")
    one, true = (ExecutionPolicy(provider_options={"a": {"x": value}}) for value in (1, True))
    assert one == true
    assert hash(one) == hash(true)


def test_canonical_forms():
    policy = ExecutionPolicy(engine="onnxruntime", fallback="onnxruntime@cpu", device=DeviceSpec(kind="cuda", index=1))
    assert (policy.engine, policy.fallback, policy.device) == (("onnxruntime",), ("onnxruntime@cpu",), "cuda:1")
    assert policy.fallback_candidates == (("onnxruntime", "cpu"),)
    assert ExecutionPolicy().fallback_candidates == ()
    assert ExecutionPolicy(memory={"limit": "8GiB"}).memory == MemoryPolicy(limit=8 << 30)
    assert RuleMatch(m="<= 16", n=" 1 .. 64 ", k="16") == RuleMatch(m="<=16", n="1..64", k=16)
    assert KernelPolicy(rules=[{"match": {"op": "conv"}, "use": "cudnn"}]).rules[0].match.op == "conv"
    assert str(AccuracyPolicy(rtol=0, atol=-0.0).atol) == "0.0"


def test_replace(full_policy):
    changed = full_policy.replace(mode="prefer", accuracy=None)
    assert (changed.mode, changed.accuracy, changed.execution) == ("prefer", None, full_policy.execution)
    with pytest.raises(PolicyError, match="unknown key 'mod' in Policy; did you mean 'mode'"):
        full_policy.replace(mod="prefer")
    with pytest.raises(PolicyError, match=r"Policy\.mode: 'strct' is not a valid value"):
        full_policy.replace(mode="strct")
    with pytest.raises(PolicyError, match=r"Policy\.mode: 'strct' is not a valid value"):
        msgspec.structs.replace(full_policy, mode="strct")


BAD = [
    (
        lambda: ExecutionPolicy(devcie="cpu"),
        "unknown key 'devcie' in ExecutionPolicy; did you mean 'device'? Valid keys: engine,",
    ),
    (
        lambda: KernelPolicy(matmul=3),
        "KernelPolicy.matmul: got the number 3. Fix: state the name of a kernel, or a list of them",
    ),
    (
        lambda: KernelPolicy(matmul={"a"}),
        "KernelPolicy.matmul: got a list. Fix: state the name of a kernel, or a list of them",
    ),
    (lambda: KernelPolicy(rules=[3]), "KernelPolicy.rules[0]: got the number 3. Fix: state a KernelRule or a mapping"),
    (
        lambda: KernelPolicy(rules=[{"match": {"op": "cov"}, "use": "cudnn"}]),
        "KernelPolicy.rules[0].match.op: 'cov' is not a valid value; did you mean 'conv'?",
    ),
    (lambda: KernelRule(use="cudnn"), "KernelRule: needs 'match'"),
    (lambda: KernelRule(match=RuleMatch(), use="cudnn"), "KernelRule.match: states no key"),
    (lambda: KernelRule(match=RuleMatch(op="conv")), "KernelRule: asks for nothing"),
    (lambda: ExecutionPolicy(precision=None), "ExecutionPolicy.precision: got nothing. Fix: state one of fp32,"),
    (
        lambda: ExecutionPolicy(device=0),
        "ExecutionPolicy.device: got the number 0. Fix: state a device such as 'cpu' or 'cuda:0'",
    ),
    (lambda: ExecutionPolicy(threads=10**500), "ExecutionPolicy.threads: a huge number is out of range"),
    (
        lambda: ExecutionPolicy(memory=3),
        "ExecutionPolicy.memory: got the number 3. Fix: state a MemoryPolicy or a mapping",
    ),
    (
        lambda: ExecutionPolicy(provider_options={"a": {1: 2}}),
        "ExecutionPolicy.provider_options.a: a key must be text, got the number 1",
    ),
    (
        lambda: ExecutionPolicy(provider_options={"a": {"b": Path("/x")}}),
        "ExecutionPolicy.provider_options.a.b: a PosixPath has no place in a policy",
    ),
    (
        lambda: ExecutionPolicy(provider_options={"a": {" ": 1}}),
        "ExecutionPolicy.provider_options.a: an option needs a name",
    ),
    (lambda: MemoryPolicy(limit="8gigs"), "MemoryPolicy.limit: '8gigs' is not a size: unit 'gigs' is not known"),
    (
        lambda: MemoryPolicy(limit=1.5),
        "MemoryPolicy.limit: got the number 1.5. Fix: state a size such as '8GiB', '512MB', or a number of bytes",
    ),
    (lambda: AccuracyPolicy(), "AccuracyPolicy: states no limit. Fix: state 'rtol', 'atol' or 'cosine'"),
    (
        lambda: AccuracyPolicy(rtol=Fraction(1, 2)),
        "AccuracyPolicy.rtol: got a Fraction. Fix: state a finite number, 0 or more",
    ),
    (lambda: RuleMatch(node="a\nb"), "RuleMatch.node: 'a\\nb' holds the character U+000A"),
    (
        lambda: Policy(execution=KernelPolicy()),
        "Policy.execution: got a KernelPolicy. Fix: state a ExecutionPolicy or a mapping",
    ),
    (lambda: Policy(kernels={"auto_strategy": "first_supported"}), "unknown key 'auto_strategy' in Policy.kernels"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message[:50] for _, message in BAD])
def test_constructors_refuse(make, message):
    with pytest.raises(PolicyError) as error:
        make()
    assert str(error.value).startswith(message), str(error.value)
    assert error.value.__suppress_context__, "the traceback shows one error"


def test_a_mapping_that_holds_itself():
    endless: dict = {}
    endless["execution"] = endless
    with pytest.raises(PolicyError, match="nested deeper than 64 levels"):
        Policy.coerce(endless)


class TestCoerce:
    def test_each_form(self, tmp_path, full_policy):
        full_policy.save(tmp_path / "policy.json")
        assert Policy.coerce(full_policy) is full_policy
        assert Policy.coerce(None) == Policy()
        assert Policy.coerce("auto") == Policy(mode="auto")
        assert Policy.coerce(tmp_path / "policy.json") == full_policy
        assert Policy.coerce(str(tmp_path / "policy.json")) == full_policy
        assert Policy.coerce(
            {"mode": "strict", "kernels": {"conv": ["cudnn"]}, "auto_strategy": "best_performance"}
        ) == Policy(mode="strict", kernels=KernelPolicy(conv=["cudnn"], auto_strategy="best_performance"))

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("strict", "policy: 'strict' is a mode, not a file. Fix: write Policy(mode='strict')"),
            (3, "policy: got the number 3. Fix: give a Policy, a path, a mapping or 'auto'"),
            (["a"], "policy: got a list. Fix: give a Policy, a path, a mapping or 'auto'"),
            (KernelPolicy(), "policy: a KernelPolicy is a part of a policy. Fix: write Policy(kernels=...)"),
            (ExecutionPolicy(), "policy: a ExecutionPolicy is a part of a policy. Fix: write Policy(execution=...)"),
            ({"mode": "strct"}, "policy: mode: 'strct' is not a valid value; did you mean 'strict'?"),
            ({"device": "cpu"}, "policy: unknown key 'device' in the policy; it belongs in 'execution'"),
            ({1: 2}, "policy: a key must be text, got the number 1"),
            ({"execution": {"device": object()}}, "policy: execution.device: a object has no place in a policy"),
        ],
    )
    def test_refusals(self, value, message):
        with pytest.raises(PolicyError) as error:
            Policy.coerce(value)
        assert str(error.value).startswith(message), str(error.value)


class TestOverrides:
    def test_nothing_given_changes_nothing(self, full_policy):
        assert full_policy.with_overrides() == full_policy

    def test_arguments_win_over_the_file_and_are_stated(self):
        policy = Policy.loads(
            "mode: strict\nexecution: {engine: tensorrt, device: 'cuda:0', precision: fp16, threads: 2}"
        )
        changed = policy.with_overrides(
            mode="auto", engine="onnxruntime", device=DeviceSpec(kind="cpu"), precision="fp32"
        )
        assert changed.stated() == {
            "mode": "auto",
            "execution.engine": ("onnxruntime",),
            "execution.device": "cpu",
            "execution.precision": "fp32",
            "execution.threads": 2,
        }

    def test_sections_are_replaced_whole(self, full_policy):
        changed = full_policy.with_overrides(
            exec_policy=ExecutionPolicy(threads=2), kernel_policy=KernelPolicy(conv="cudnn"), device="cpu"
        )
        assert changed.execution == ExecutionPolicy(threads=2, device="cpu")
        assert changed.kernels == KernelPolicy(conv="cudnn")
        assert (changed.mode, changed.accuracy) == (full_policy.mode, full_policy.accuracy)

    def test_back_to_the_default_is_possible(self):
        policy = Policy.loads("execution: {precision: fp16, device: cpu}")
        assert policy.with_overrides(precision="model").stated() == {"execution.device": "cpu"}

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"device": "cuda:-1"}, "ExecutionPolicy.device: 'cuda:-1' is not a device: its index is negative"),
            ({"engine": []}, "ExecutionPolicy.engine: the list is empty"),
            ({"precision": "fp32"}, "ExecutionPolicy.tf32: true contradicts precision 'fp32'"),
            ({"mode": "hard"}, "Policy.mode: 'hard' is not a valid value"),
            ({"kernel_policy": {"matmul": "cublas"}}, "kernel_policy: got a mapping. Fix: give a KernelPolicy"),
            ({"exec_policy": KernelPolicy()}, "exec_policy: got a KernelPolicy. Fix: give a ExecutionPolicy"),
        ],
    )
    def test_refusals(self, given, message):
        with pytest.raises(PolicyError) as error:
            Policy(execution=ExecutionPolicy(tf32=True)).with_overrides(**given)
        assert str(error.value).startswith(message), str(error.value)


def test_stated_lists_every_key_away_from_its_default(full_policy):
    rules = full_policy.kernels.rules
    assert full_policy.stated() == {
        "mode": "strict",
        "execution.engine": ("tensorrt", "onnxruntime"),
        "execution.device": "cuda:0",
        "execution.precision": "fp16",
        "execution.fallback": ("onnxruntime@cuda:0", "onnxruntime@cpu"),
        "execution.allow_cpu_ops": ("Shape",),
        "execution.static_shape": True,
        "execution.shapes.image": (1, 3, 224, 224),
        "execution.shapes.scale": (),
        "execution.cuda_graph": "prefer",
        "execution.memory.pool": "caching",
        "execution.memory.limit": 8 << 30,
        "execution.artifacts.cache": "/data/cache",
        "execution.artifacts.stale": "rebuild",
        "execution.determinism": "run_to_run",
        "execution.tf32": False,
        "execution.weights.storage": "int4",
        "execution.weights.compute": "float",
        "execution.weights.group": 32,
        "execution.weights.exclude": ("lm_head",),
        "execution.layout": "nhwc",
        "execution.threads": 4,
        "execution.provider_options.onnxruntime.use_tf32": "off",
        "execution.provider_options.onnxruntime.x": 1,
        "execution.provider_options.onnxruntime.y": 1.5,
        "execution.provider_options.onnxruntime.z": True,
        "kernels.matmul": "cublasLt",
        "kernels.attention": ("cudnn", "flash_v2"),
        "kernels.layer_norm": "cuda_raw",
        "kernels.rms_norm": "torch",
        "kernels.conv": ("cudnn_heuristic", "auto"),
        "kernels.rules[0]": rules[0],
        "kernels.rules[1]": rules[1],
        "kernels.auto_strategy": "best_performance",
        "accuracy.reference": "onnxruntime.cpu.model",
        "accuracy.rtol": 0.01,
        "accuracy.atol": 0.001,
        "accuracy.cosine": 0.999,
        "calibration.path": "/data/calibration.npz",
        "calibration.digest": f"sha256:{'0f' * 32}",
        "calibration.samples": 64,
    }
    assert Policy().stated() == {}
    assert Policy.loads("mode: prefer\nexecution: {precision: model, cuda_graph: off, fallback: error}").stated() == {}
