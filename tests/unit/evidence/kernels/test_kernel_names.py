# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What names of kernels say: names as cuBLAS, cuDNN, CUTLASS, PyTorch and ONNX Runtime gave them on a GPU."""

from __future__ import annotations

import pytest

from xpuruntime.evidence.kernel_records import parse_kernel_name, short_name

#: Name, whether on tensor cores, in which precision.
NAMES = [
    (
        "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel"
        "__51_cublas",
        False,
        "fp32",
    ),
    (
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_cublas",
        True,
        "tf32",
    ),
    (
        "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x64x64_warpgroupsize1x1x1_g1_strided_"
        "execute_kernel__5x_cudnn",
        True,
        "fp16",
    ),
    ("nvjet_sm90_hsh_448x64_64x2_1x2_h_bz_coopB_NNN", True, "fp16"),
    ("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_TNT", True, "bf16"),
    (
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x4_nn_align4>"
        "(cutlass_80_tensorop_s1688gemm_64x64_32x4_nn_align4::Params)",
        True,
        "tf32",
    ),
    (
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>"
        "(cutlass_80_simt_sgemm_128x32_8x5_tn_align1::Params)",
        False,
        "fp32",
    ),
    ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_f16_64x64_64x6_nn_align2>(Params)", True, "fp16"),
    ("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8", True, "bf16"),
    ("ampere_sgemm_128x64_tn", False, "fp32"),
    ("volta_dgemm_64x64_nn", False, "fp64"),
    ("volta_h884gemm_256x128_ldg8_nn", True, "fp16"),
    ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>(float)", False, None),
    ("void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int)", False, "fp32"),
    ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(float const*)", False, None),
    (
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::half_t>, false>(Params)",
        True,
        "fp16",
    ),
]
#: What multiplies nothing, or says nothing of it.
SILENT = [
    "void onnxruntime::cuda::_UnaryElementWise<float, float, onnxruntime::cuda::OP_Relu<float>, 256, 4>(float const*)",
    "void onnxruntime::cuda::_UnaryElementWise<__half, __half, onnxruntime::cuda::OP_Relu<__half>, 256, 4>(__half*)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __half, float, false>(float)",
    "copy host (pageable) -> device",
    "fill",
    "",
]


@pytest.mark.parametrize(("name", "tensor_cores", "precision"), NAMES)
def test_a_known_name_says_how_it_multiplies(name: str, tensor_cores: bool, precision: str | None) -> None:
    assert parse_kernel_name(name) == (tensor_cores, precision)


@pytest.mark.parametrize("name", SILENT)
def test_other_names_say_nothing(name: str) -> None:
    assert parse_kernel_name(name) == (None, None)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>(Params)",
            "cutlass_80_simt_sgemm_128x32_8x5_tn_align1",
        ),
        ("void at::native::(anonymous namespace)::softmax<4, f<float>>(int, float*)", "at::native::softmax"),
        ("nvjet_sm90_hsh_448x64_64x2_1x2_h_bz_coopB_NNN", "nvjet_sm90_hsh_448x64_64x2_1x2_h_bz_coopB_NNN"),
        ("(a)", "(a)"),
        ("", ""),
    ],
)
def test_a_short_name_is_without_arguments(name: str, short: str) -> None:
    assert short_name(name) == short
