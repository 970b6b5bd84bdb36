# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operators and autograd functions of other packages, under a policy and in evidence."""

from __future__ import annotations

import pytest

import xpuruntime as xrt
from xpuruntime.errors import UnsupportedOperationError

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

from explained_block import of  # noqa: E402 - it needs PyTorch

from xpuruntime.pytorch.coverage.operation_table import (  # noqa: E402
    operation_of,
    uncovered_kernel,
    uncovered_operator,
)

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards")]

X = torch.randn(4, 8)


def strict(**kernels):
    return xrt.Policy(mode="strict", kernels=kernels)


def attend(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v


@pytest.fixture(params=["CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"])
def attention(request):
    library = torch.library.Library("flash_attn_under_test", "DEF")
    library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v) -> Tensor")
    library.impl("_flash_attn_forward", attend, request.param)
    yield torch.ops.flash_attn_under_test._flash_attn_forward
    library._destroy()


@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"])
def test_strict_refuses_kernels_of_a_package_that_is_not_known_by_their_names(key):
    """What is made of PyTorch's operators goes on, as those obey."""
    library = torch.library.Library("some_other_package", "DEF")
    library.define("fused_gemm(Tensor a, Tensor b) -> Tensor")
    library.impl("fused_gemm", torch.mm, key)
    try:
        with xt.kernel_policy(strict(matmul="cpu.blas")), xt.explain() as report:
            if key == "CPU":
                with pytest.raises(UnsupportedOperationError, match=r"some_other_package::fused_gemm .*use: torch"):
                    torch.ops.some_other_package.fused_gemm(X, X.T)
                return
            torch.ops.some_other_package.fused_gemm(X, X.T)
        assert {(row.operator, row.status) for row in of(report, "matmul")} == {("aten::mm", "honoured")}
    finally:
        library._destroy()


@pytest.mark.parametrize("kernel", ["torch.math", "cpu.reference"])
def test_strict_refuses_such_an_operator_before_it_runs(attention, kernel):
    q = torch.randn(1, 2, 6, 4)
    refused = pytest.raises(UnsupportedOperationError, match=r"flash_attn_under_test::_flash_attn_forward .*use: torch")
    with xt.kernel_policy(strict(attention=kernel)), refused:
        attention(q, q, q)
    torch.testing.assert_close(attention(q, q, q), attend(q, q, q))


def test_a_rule_and_other_operations_let_it_run_with_its_gradient(attention):
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    rules = [{"match": {"op": "attention", "head_dim": 4}, "use": "torch"}]
    for policy in (strict(attention="torch.math", rules=rules), strict(matmul="cpu.reference")):
        with xt.kernel_policy(policy):
            found = attention(q, q, q)
        torch.testing.assert_close(found, attend(q, q, q))


def test_what_is_left_to_pytorch_by_name_is_not_what_another_package_ran(attention):
    q, target = torch.randn(1, 2, 6, 4), torch.zeros(6, dtype=torch.long)
    with xt.kernel_policy(attention="torch.sdpa", cross_entropy="torch"), xt.explain() as report:
        logits = attention(q, q, q)[0, 0].requires_grad_()
        torch.nn.functional.cross_entropy(logits, target).backward()
    assert {row.status for row in of(report, "attention")} == {"default"}
    rows = of(report, "cross_entropy")
    assert {row.phase for row in rows} == {"train", "backward"}
    assert {(row.resolved, row.status) for row in rows} == {("torch.cross_entropy", "honoured")}


def test_evidence_calls_it_attention_that_bypassed_the_policy(attention):
    q = torch.randn(1, 2, 6, 4)
    with xt.kernel_policy(attention="cpu.reference"), xt.explain() as report:
        attention(q, q, q)
    (row,) = of(report, "attention")
    assert (row.operator, row.status) == ("flash_attn_under_test::_flash_attn_forward", "bypassed")
    assert "another package" in row.reason
    with pytest.raises(UnsupportedOperationError, match="bypassed the policy"):
        report.require()


def test_an_operator_that_no_row_names_is_unknown_and_never_other():
    library = torch.library.Library("some_package", "DEF")
    library.define("compute(Tensor x) -> Tensor")
    library.impl("compute", lambda x: torch.from_numpy(x.numpy() @ x.numpy().T), "CPU")
    with xt.explain() as report:
        torch.ops.some_package.compute(X)
    library._destroy()
    (row,) = (row for row in report.rows if row.operator == "some_package::compute")
    assert (row.op, row.status) == ("unknown:some_package", "opaque")


class LigerRMSNormFunction(torch.autograd.Function):
    __module__ = "liger_kernel.ops.rms_norm"

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() / (x.detach().numpy() ** 2).mean(-1, keepdims=True) ** 0.5)

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(grad.numpy() * ctx.saved_tensors[0].detach().numpy())


class OwnNorm(torch.nn.Module):
    def forward(self, x):
        return LigerRMSNormFunction.apply(x)


def test_an_autograd_function_is_named_with_its_package_and_module():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), OwnNorm())
    with xt.kernel_policy(rms_norm="cpu.reference"), xt.explain(root=model) as report:
        model(X).sum().backward()
    rows = of(report, "rms_norm")
    assert {(row.operator, row.module, row.status) for row in rows} == {
        ("LigerRMSNormFunction", "1", "bypassed"), ("LigerRMSNormFunctionBackward", "1", "bypassed"),
    }  # fmt: skip
    assert all("liger_kernel.ops.rms_norm.LigerRMSNormFunction" in row.reason for row in rows)


class FlashAttnFunc(torch.autograd.Function):
    __module__ = "flash_attn.flash_attn_interface"

    @staticmethod
    def forward(q, k, v):
        return torch.from_numpy(q.detach().numpy() + k.detach().numpy() + v.detach().numpy())

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, grad, grad


def multiply(x):
    return x @ x.T


class OwnMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return multiply(x)

    @staticmethod
    def backward(ctx, grad):
        return (grad + grad.T) @ ctx.saved_tensors[0]


FUNCTIONS = {
    "rms_norm": lambda x: LigerRMSNormFunction.apply(x), "attention": lambda x: FlashAttnFunc.apply(x, x, x),
}  # fmt: skip


@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("grad", [False, True])
def test_strict_refuses_such_a_function_before_it_runs(op, grad):
    x = torch.randn(1, 2, 4, 8, requires_grad=grad)
    kernels = {op: "cpu.reference"}
    refused = pytest.raises(UnsupportedOperationError, match=r"(LigerRMSNormFunction|FlashAttnFunc) of .*use: torch")
    with torch.set_grad_enabled(grad):
        with xt.kernel_policy(strict(**kernels)), refused:
            FUNCTIONS[op](x)
        rules = [{"match": {"op": op, "phase": "train" if grad else "infer"}, "use": "torch"}]
        for policy in (strict(**kernels, rules=rules), strict(matmul="cpu.reference"), xrt.Policy(kernels=kernels)):
            with xt.kernel_policy(policy):
                FUNCTIONS[op](x)


def test_a_function_that_multiplies_by_pytorchs_operators_obeys():
    x = X.clone().requires_grad_()
    with xt.kernel_policy(strict(matmul="cpu.reference")), xt.explain() as report:
        OwnMatmul.apply(x).sum().backward()
    assert {(row.operator, row.status) for row in of(report, "matmul")} == {("aten::mm", "honoured")}
    report.require()


PRODUCTS = {
    "of integers": lambda: torch._int_mm(torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 32, dtype=torch.int8)),
    "with a vector": lambda: X @ X[0],
    "with a vector, and a sum": lambda: torch.addmv(X[:, 0], X, X[0]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_strict_refuses_products_that_no_kernel_can_stand_in_for(name):
    with xt.kernel_policy(strict(matmul="cpu.blas")), pytest.raises(UnsupportedOperationError, match="use: torch"):
        PRODUCTS[name]()
    rules = [{"match": {"op": "matmul", "n": 1 if "vector" in name else 32}, "use": "torch"}]
    with xt.kernel_policy(strict(matmul="cpu.blas", rules=rules)):
        PRODUCTS[name]()
    with xt.kernel_policy(strict(matmul=["cpu.blas", "auto"])):
        PRODUCTS[name]()


@pytest.mark.parametrize("old", [False, True])
def test_spectral_norm_goes_on_with_the_rule_that_the_error_states(old):
    def made():
        torch.manual_seed(0)
        norm = torch.nn.utils.spectral_norm if old else torch.nn.utils.parametrizations.spectral_norm
        return norm(torch.nn.Linear(8, 6))

    model = made()
    rule = r"\{match: \{op: matmul, n: 1\}, use: torch\}"
    with xt.kernel_policy(strict(matmul="cpu.reference")), pytest.raises(UnsupportedOperationError, match=rule):
        model(X)
    rules = [{"match": {"op": "matmul", "n": 1}, "use": "torch"}]
    for kernels in ({"matmul": "cpu.reference", "rules": rules}, {"matmul": ["cpu.reference", "auto"]}):
        model = made()
        with xt.kernel_policy(strict(**kernels)), xt.explain(root=model) as report:
            model(X).sum().backward()
        report.require()
        rows = {row.operator: row.status for row in of(report, "matmul")}
        assert rows == {"aten::addmm": "honoured", "aten::mm": "honoured", "aten::mv": "honoured"}
        with xt.kernel_policy(strict(**kernels)), xt.explain() as report:
            X @ X[0]
        assert [sentence.partition(",")[2] for sentence in report.never_ran] == (
            [" and no call of matmul that this key decides was seen: 0 calls obey"] if "rules" in kernels else []
        )
        plain = made()
        plain(X).sum().backward()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("flash_attn::_flash_attn_varlen_forward", "attention"),
        ("flash_attn_3::fwd", "attention"),
        ("_vllm_fa3_C::fwd", "attention"),
        ("vllm::unified_attention_with_output", "attention"),
        ("_C::paged_attention_v1", "attention"),
        ("xformers_flash::flash_fwd", "attention"),
        ("_flash_attn_9e27194::fwd", "attention"),
        ("_C::fused_add_rms_norm", "rms_norm"),
        ("torch_vendor_quack::_rmsnorm_bwd", "rms_norm"),
        ("_C::rotary_embedding", "rope"),
        ("_C::silu_and_mul", "swiglu"),
        ("_C::gelu_tanh_and_mul", "geglu"),
        ("quack::cross_entropy_fwd_out", "cross_entropy"),
        ("quack::_softmax_fwd", "softmax"),
        ("quack::gemm_act_out", "matmul"),
        ("torchao::rowwise_scaled_linear_sparse_cutlass_f8f8", "matmul"),
        ("torchao::quantize_affine", "quantize"),
        ("_C::cutlass_scaled_mm", "matmul"),
        ("_C::dynamic_scaled_int8_quant", "quantize"),
        ("fbgemm::f8f8bf16_rowwise", "matmul"),
        ("bitsandbytes::int8_linear_matmul", "matmul"),
        ("_moe_C::moe_wna16_gemm", "grouped_matmul"),
        ("_moe_C::topk_softmax", "routing"),
        ("_C_cache_ops::reshape_and_cache_flash", "cache_update"),
        ("flash_attn_3::get_scheduler_metadata", "metadata"),
        ("torchao::something", "unknown:torchao"),
        ("npu::npu_fusion_attention", "attention"),
        ("some_package::fused_attn_fwd", "attention"),
        ("some_package::mla_decode.out", "attention"),
        ("some_package::paged_kv_decode", "attention"),
        ("some_package::mha_mask", "unknown:some_package"),
        ("some_package::attn_plan", "unknown:some_package"),
        ("trtllm::fp8_block_scaling_gemm", "matmul"),
        ("some_package::fused_linear", "matmul"),
        ("some_package::linear_interpolate", "unknown:some_package"),
        ("some_package::prepack_gemm", "unknown:some_package"),
        ("aten::mm", None),
        ("autograd::engine::evaluate_function: MmBackward0", None),
    ],
)
def test_what_operators_of_other_packages_compute(name, op):
    assert operation_of(name) == op


@pytest.mark.parametrize(
    ("name", "op"),
    [("quantized::linear_dynamic", "matmul"), ("onednn::qconv_pointwise", "conv"), ("quantized::linear_prepack", None)],
)
def test_what_operators_on_quantized_tensors_compute(name, op):
    found = uncovered_operator(name)
    assert (found and found.op) == op


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("fused_moe_kernel", "grouped_matmul"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object", "attention"),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        ("kernel_cutlass_kernel_quackrmsnormRMSNorm_object_at__tensorptrbf16", "rms_norm"),
        ("kernel_cutlass_kernel_quackcross_entropyCrossEntropy_object", "cross_entropy"),
        ("kernel_cutlass_kernel_quacklinear_cross_entropyLinearCrossEntropy_object", "linear_cross_entropy"),
        ("kernel_cutlass_kernel_quacksoftmaxSoftmax_object", "softmax"),
        ("kernel_cutlass_kernel_quackrotaryRotary_object", "rope"),
        ("kernel_cutlass_kernel_quackgemm_sm90GemmSm90_object", "matmul"),
        ("_rms_norm_forward_kernel", "rms_norm"),
        ("_layer_norm_forward_kernel", "layer_norm"),
        ("_swiglu_forward_kernel", "swiglu"),
        ("_geglu_tanh_forward_kernel", "geglu"),
        ("_triton_rope", "rope"),
        ("liger_cross_entropy_kernel", "cross_entropy"),
        ("_softmax_single_block_forward_kernel", "softmax"),
        ("void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>", "rms_norm"),
        ("void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &(silu(float const&))>", "swiglu"),
        ("void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<...>", "rope"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "rms_norm"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>", "rope"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>", "swiglu"),
        ("void vllm::reshape_and_cache_flash_kernel<...>", "cache_update"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<...>", "layer_norm"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<...>", "softmax"),
    ],
)
def test_what_kernels_of_other_packages_compute(name, op):
    kernel = uncovered_kernel(name)
    assert kernel.op == op
    assert "was when no policy" not in kernel.reason
