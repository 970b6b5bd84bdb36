# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`KernelPolicy` and its rules."""

from __future__ import annotations

import json
import re

import pytest

from xpuruntime import _core
from xpuruntime.errors import PolicyError
from xpuruntime.policies import ExecutionPolicy, KernelPolicy, KernelRule, Policy, RuleMatch
from xpuruntime.policies.kernel_rules import FAMILIES, KERNEL_IDS, OPS, check_kernel


class TestShortForms:
    def test_preferences(self):
        policy = KernelPolicy(matmul="cublasLt", attention=["cudnn", "flash_v2"])
        assert policy.preferences == {"matmul": "cublasLt", "attention": ("cudnn", "flash_v2")}
        with pytest.raises(TypeError, match=r"policy\.set\(op, kernel\)"):
            policy.preferences["matmul"] = "cublas"
        assert policy.matmul == "cublasLt"

    def test_set_get_remove_return_new_values(self):
        first = KernelPolicy(matmul="cublasLt", auto_strategy="best_performance")
        second = first.set("attention", "flash_v2").set("conv", ["cudnn"]).remove("matmul").remove("matmul")
        assert first == KernelPolicy(matmul="cublasLt", auto_strategy="best_performance")
        assert second.preferences == {"attention": "flash_v2", "conv": ("cudnn",)}
        assert second.auto_strategy == "best_performance"
        assert (second.get("matmul"), second.get("conv")) == (None, ("cudnn",))

    @pytest.mark.parametrize(
        "call",
        [
            lambda policy: policy.get("matmull"),
            lambda policy: policy.set("matmull", "cublas"),
            lambda policy: policy.remove("matmull"),
            lambda policy: policy.choose("matmull"),
        ],
    )
    def test_unknown_operation(self, call):
        with pytest.raises(PolicyError, match="'matmull' is not an operation of a KernelPolicy; did you mean 'matmul'"):
            call(KernelPolicy())

    def test_set_refuses_bad_kernels(self):
        with pytest.raises(PolicyError, match=r"KernelPolicy\.matmul: 'cublaslt' is not a known kernel for matmul"):
            KernelPolicy().set("matmul", "cublaslt")
        with pytest.raises(PolicyError, match=r"no kernel is given; to take the key out, use remove\('matmul'\)"):
            KernelPolicy().set("matmul", None)


class TestIds:
    @pytest.mark.parametrize("op", OPS)
    def test_every_family_and_id_is_accepted_for_its_operation(self, op):
        own = [kernel for kernel, (ops, _) in KERNEL_IDS.items() if op in ops]
        for kernel in [*FAMILIES[op], *own, "my_vendor.fast_kernel"]:
            assert check_kernel(kernel, op) == check_kernel(kernel, None) == kernel
            assert KernelPolicy(**{op: kernel}).get(op) == kernel
        assert all(meaning for meaning in FAMILIES[op].values())

    def test_those_of_this_library_are_the_ones_it_has(self):
        """A build without CUDA, or without the headers of a vendor, has fewer backends."""
        registered: dict[str, set[str]] = {}
        for kernel in _core.KernelRegistry.instance().kernels():
            op = re.sub("_(backward|input_gradient|weight_gradient)$", "", kernel["op"])
            registered.setdefault(kernel["id"], set()).add(op)
        backends = {"cuda_raw", "cudnn", "cublas", "cpu", "null"} & {kernel.partition(".")[0] for kernel in registered}
        assert {"cpu", "null"} <= backends
        known = {kernel: set(ops) for kernel, (ops, _) in KERNEL_IDS.items() if kernel.partition(".")[0] in backends}
        assert known == {kernel: ops for kernel, ops in registered.items() if kernel.partition(".")[0] in backends}

    def test_an_id_of_several_operations(self):
        assert KernelPolicy(matmul="cpu.reference", conv="cpu.reference").conv == "cpu.reference"
        with pytest.raises(PolicyError, match=r"'cpu\.vectorised' is a kernel of layer_norm and rms_norm, not of conv"):
            KernelPolicy(conv="cpu.vectorised")

    @pytest.mark.parametrize("kernel", ["a.b.c", ".a", "a.", "a b.c", "1a.b", "a-b.c", "a..b"])
    def test_ids_that_are_not(self, kernel):
        with pytest.raises(PolicyError, match=r"is not a kernel id: an id is 'backend.name', with one dot"):
            KernelPolicy(matmul=kernel)

    def test_an_id_may_carry_a_configuration(self):
        kernel = "cublas.cublasLt@algo=66,tile=20,split=2:1+a-b_c"
        policy = KernelPolicy(matmul=kernel, rules=[{"match": {"m": 1}, "use": [kernel, "auto"]}])
        assert policy.get("matmul") == kernel
        assert KernelPolicy.from_json(policy.to_json()) == policy
        with pytest.raises(PolicyError, match="is a kernel of matmul, not of conv"):
            KernelPolicy(conv=kernel)
        with pytest.raises(PolicyError, match="gives a configuration to a family"):
            KernelPolicy(matmul="cublasLt@algo=66")

    @pytest.mark.parametrize("kernel", ["a.b@", "a.b@c d", "a.b@c@d", "a.b@é", "@a.b"])
    def test_configurations_that_are_not(self, kernel):
        with pytest.raises(PolicyError, match="is not a"):
            KernelPolicy(matmul=kernel)


class TestMatch:
    @pytest.mark.parametrize(
        ("condition", "inside", "outside"),
        [
            (16, [16], [15, 17]),
            ("16", [16], [15, 17]),
            ("<=16", [0, 16], [17]),
            ("<16", [15], [16]),
            (">=128", [128, 10**12], [127]),
            (">128", [129], [128]),
            ("1..64", [1, 64], [0, 65]),
            ("5..5", [5], [4, 6]),
            (0, [0], [1]),
        ],
    )
    @pytest.mark.parametrize("key", ["m", "n", "k", "head_dim"])
    def test_numbers(self, key, condition, inside, outside):
        match = RuleMatch(**{key: condition})
        assert all(match.matches(**{key: value}) for value in inside)
        assert not any(match.matches(**{key: value}) for value in outside)
        assert not match.matches()

    @pytest.mark.parametrize(
        ("stated", "facts", "expected"),
        [
            ({}, {}, True),
            ({}, {"op": "conv", "m": 3}, True),
            ({"op": "conv"}, {"op": "conv"}, True),
            ({"op": "conv"}, {"op": "matmul"}, False),
            ({"dtype": "bf16"}, {"dtype": "bf16"}, True),
            ({"dtype": ["bf16", "fp16"]}, {"dtype": "fp16"}, True),
            ({"dtype": ["bf16", "fp16"]}, {"dtype": "fp32"}, False),
            ({"phase": "backward"}, {"phase": "train"}, False),
            ({"phase": ["train", "backward"]}, {"phase": "train"}, True),
            ({"device": "cuda"}, {"device": "cuda:1"}, True),
            ({"device": "cuda:1"}, {"device": "cuda:1"}, True),
            ({"device": "cuda:1"}, {"device": "cuda:10"}, False),
            ({"device": "cpu"}, {"device": "cpu"}, True),
            ({"device": "auto"}, {"device": "npu"}, True),
            ({"device": "sm90"}, {"device": "cuda:0", "arch": "sm90"}, True),
            ({"device": "sm90"}, {"device": "cuda:0", "arch": "sm80"}, False),
            ({"node": "layers.*.attn"}, {"node": "layers.3.attn"}, True),
            ({"node": "layers.*.attn"}, {"node": "layers.3.block.attn"}, True),
            ({"node": "layers.*.attn"}, {"node": "layers.3.mlp"}, False),
            ({"node": "layers.*.attn"}, {"node": "LAYERS.3.attn"}, False),
            ({"node": "ln_?"}, {"node": "ln_12"}, False),
            ({"module": "decoder.*"}, {"module": "decoder.1.fc"}, True),
            ({"module": "decoder.*"}, {"node": "decoder.1.fc"}, False),
            ({"op": "matmul", "m": "<=16", "dtype": "bf16"}, {"op": "matmul", "m": 8, "dtype": "bf16", "n": 1}, True),
            ({"op": "matmul", "m": "<=16", "dtype": "bf16"}, {"op": "matmul", "m": 8, "dtype": "fp16"}, False),
            ({"op": "matmul", "m": "<=16", "dtype": "bf16"}, {"op": "matmul", "dtype": "bf16"}, False),
        ],
    )
    def test_facts(self, stated, facts, expected):
        assert RuleMatch(**stated).matches(**facts) is expected


class TestChoose:
    POLICY = KernelPolicy(
        matmul="cublasLt",
        attention=["cudnn", "flash_v2"],
        rules=[
            KernelRule(match=RuleMatch(node="head*"), precision="fp32"),
            KernelRule(match=RuleMatch(op="matmul", m="<=16"), use="cuda_raw.skinny", precision="bf16"),
            KernelRule(match=RuleMatch(op="matmul", m="<=64"), use=["cublas", "auto"], precision="fp16"),
            KernelRule(match=RuleMatch(node="head*"), use="torch"),
        ],
    )

    @pytest.mark.parametrize(
        ("op", "facts", "use", "source"),
        [
            ("matmul", {"m": 8}, ("cuda_raw.skinny",), "kernels.rules[1]"),
            ("matmul", {"m": 17}, ("cublas", "auto"), "kernels.rules[2]"),
            ("matmul", {"m": 65}, ("cublasLt",), "kernels.matmul"),
            ("matmul", {}, ("cublasLt",), "kernels.matmul"),
            ("matmul", {"node": "head.0"}, ("torch",), "kernels.rules[3]"),
            ("matmul", {"node": "head.0", "m": 8}, ("cuda_raw.skinny",), "kernels.rules[1]"),
            ("attention", {"head_dim": 64}, ("cudnn", "flash_v2"), "kernels.attention"),
            ("conv", {}, ("auto",), "default"),
            ("conv", {"node": "head.0"}, ("torch",), "kernels.rules[3]"),
        ],
    )
    def test_the_first_rule_that_matches_and_states_use_wins(self, op, facts, use, source):
        assert self.POLICY.choose(op, **facts) == (use, source)

    @pytest.mark.parametrize(
        ("op", "facts", "precision", "source"),
        [
            ("matmul", {"m": 8, "node": "head.0"}, "fp32", "kernels.rules[0]"),
            ("matmul", {"m": 8}, "bf16", "kernels.rules[1]"),
            ("matmul", {"m": 32}, "fp16", "kernels.rules[2]"),
            ("matmul", {}, None, "default"),
            (None, {"node": "head.softmax"}, "fp32", "kernels.rules[0]"),
            (None, {}, None, "default"),
        ],
    )
    def test_precision(self, op, facts, precision, source):
        assert self.POLICY.choose_precision(op, **facts) == (precision, source)


class TestFiles:
    def test_the_seed_example(self, tmp_path):
        KernelPolicy(matmul="cublasLt", attention="flash_v2").save(tmp_path / "policy.json")
        assert KernelPolicy.load(tmp_path / "policy.json") == KernelPolicy(matmul="cublasLt", attention="flash_v2")
        assert json.loads((tmp_path / "policy.json").read_text()) == {
            "schema": "xpuruntime.policy/1",
            "kernels": {"matmul": "cublasLt", "attention": "flash_v2"},
        }

    def test_auto_strategy_is_not_lost(self):
        policy = KernelPolicy(auto_strategy="best_performance")
        assert KernelPolicy.from_json(policy.to_json()) == policy
        assert json.loads(policy.to_json()) == {"schema": "xpuruntime.policy/1", "auto_strategy": "best_performance"}

    @pytest.mark.parametrize(
        ("policy", "sections"),
        [
            (Policy(execution=ExecutionPolicy(threads=2)), "mode and execution"),
            (Policy(mode="strict"), "mode"),
        ],
    )
    def test_other_sections_are_refused(self, tmp_path, policy, sections):
        policy.save(tmp_path / "policy.yaml")
        with pytest.raises(
            PolicyError, match=f"states {sections}, which a KernelPolicy cannot hold; read it with Policy.load"
        ):
            KernelPolicy.load(tmp_path / "policy.yaml")


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"attention": "sdpa"}, "Fix: write cudnn.sdpa, or another that `xrt kernels attention` lists"),
        ({"rms_norm": "cpu.blas"}, "Fix: write cpu.vectorised, or another that `xrt kernels rms_norm` lists"),
        ({"matmul": "flash_v2"}, "Fix: write auto, or another that `xrt kernels matmul` lists"),
        ({"swiglu": "cpu.blas"}, "or another of liger.swiglu, compiled.swiglu, flashinfer.swiglu"),
    ],
)
def test_a_fix_names_a_kernel_of_the_operation_and_where_the_others_are(fields, fix):
    with pytest.raises(PolicyError) as refused:
        KernelPolicy(**fields)
    assert str(refused.value).endswith(fix)
