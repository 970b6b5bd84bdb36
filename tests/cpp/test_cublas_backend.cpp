// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <string>

#include "backend_operands.h"
#include "cublas/lt_config.h"
#include "cublas/matmul_problem.h"
#include "xpuruntime/error.h"
#include "xpuruntime/matmul_op.h"
#if defined(XPURUNTIME_WITH_CUBLAS)
#include "cublas/register.h"
#include "xpuruntime/kernel_registry.h"
#endif

// What this backend says without cuBLAS and without a device.
namespace xpuruntime {
namespace {

using namespace testing;
using cublas::Element;
using cublas::LtConfig;
using cublas::MatmulProblem;

struct Case {
  MatmulInputs inputs;
  MatmulOptions options{};
  Dims out_strides{};
  std::uintptr_t out_address = std::uintptr_t{1} << 40U;

  OpDesc desc() const {
    OpCall call = make_matmul(inputs, options);
    const OutputSpec spec = call.outputs()[0];
    call.set_output(spec, operand("out", spec.dtype, Dims(spec.dims().begin(), spec.dims().end()),
                                  out_strides, out_address));
    return call.desc;
  }
};

Case plain(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k) {
  Case made;
  made.inputs.a = operand("a", dtype, {m, k});
  made.inputs.b = operand("b", dtype, {k, n});
  return made;
}

Case fp8(std::int64_t m, std::int64_t n, std::int64_t k) {
  Case made;
  made.inputs.a = operand("a", kFp8, {m, k});
  made.inputs.b = operand("b", kFp8, {k, n}, {1, k});
  return made;
}

MatmulProblem problem_of(const Case& one) {
  MatmulProblem problem;
  const Support support = cublas::describe_matmul(one.desc(), device_of(9, 0), problem);
  EXPECT_TRUE(support.ok) << support.reason;
  return problem;
}

std::string lt_says(const Case& one, const DeviceInfo& device = device_of(9, 0)) {
  MatmulProblem problem;
  Support support = cublas::describe_matmul(one.desc(), device, problem);
  if (support.ok) support = cublas::check_for_lt(problem, device);
  return support.ok ? "yes" : support.reason;
}

std::string gemm_says(const Case& one) {
  MatmulProblem problem;
  Support support = cublas::describe_matmul(one.desc(), device_of(9, 0), problem);
  if (support.ok) support = cublas::check_for_gemm(problem);
  return support.ok ? "yes" : support.reason;
}

TEST(CublasProblem, DescribesRowMajorMatricesAsColumns) {
  const MatmulProblem problem = problem_of(plain(kBfloat, 3, 5, 7));
  EXPECT_EQ(problem.m, 3);
  EXPECT_EQ(problem.n, 5);
  EXPECT_EQ(problem.k, 7);
  EXPECT_EQ(problem.batch, 1);
  EXPECT_FALSE(problem.first.transposed);
  EXPECT_EQ(problem.first.rows, 5);
  EXPECT_EQ(problem.first.columns, 7);
  EXPECT_EQ(problem.first.leading, 5);
  EXPECT_FALSE(problem.second.transposed);
  EXPECT_EQ(problem.second.rows, 7);
  EXPECT_EQ(problem.second.columns, 3);
  EXPECT_EQ(problem.out.rows, 5);
  EXPECT_EQ(problem.out.columns, 3);
  EXPECT_EQ(problem.zero_bytes, 0U);
}

TEST(CublasProblem, TakesTransposedViewsAndSlicesWithoutACopy) {
  Case one = plain(kHalf, 3, 5, 7);
  one.inputs.a = operand("a", kHalf, {3, 7}, {1, 4});    // a transpose with a gap
  one.inputs.b = operand("b", kHalf, {7, 5}, {1, 100});  // rows of a wide weight
  one.out_strides = {9, 1};
  const MatmulProblem problem = problem_of(one);
  EXPECT_TRUE(problem.second.transposed);
  EXPECT_EQ(problem.second.rows, 3);
  EXPECT_EQ(problem.second.columns, 7);
  EXPECT_EQ(problem.second.leading, 4);
  EXPECT_TRUE(problem.first.transposed);
  EXPECT_EQ(problem.first.leading, 100);
  EXPECT_EQ(problem.out.leading, 9);
}

TEST(CublasProblem, RefusesStridesThatAreNoMatrix) {
  Case one = plain(kHalf, 3, 5, 7);
  one.inputs.a = operand("a", kHalf, {3, 7}, {14, 2});
  EXPECT_TRUE(contains(lt_says(one), "'a' has the strides [14, 2]")) << lt_says(one);
  one.inputs.a = operand("a", kHalf, {3, 7}, {0, 1});
  EXPECT_TRUE(contains(lt_says(one), "'a' has the strides [0, 1]")) << lt_says(one);
  one.inputs.a = operand("a", kHalf, {3, 7}, {-7, 1});
  EXPECT_TRUE(contains(lt_says(one), "make it contiguous")) << lt_says(one);
  one.inputs.a = operand("a", kHalf, {3, 7});
  one.out_strides = {1, 3};
  EXPECT_TRUE(contains(gemm_says(one), "'out' has the strides [1, 3]")) << gemm_says(one);
}

TEST(CublasProblem, BatchesHaveStridesAndAreBroadcast) {
  Case one;
  one.inputs.a = operand("a", kSingle, {4, 3, 7}, {0, 7, 1});
  one.inputs.b = operand("b", kSingle, {4, 7, 5}, {200, 5, 1});
  const MatmulProblem problem = problem_of(one);
  EXPECT_EQ(problem.batch, 4);
  EXPECT_EQ(problem.second.batch_stride, 0);
  EXPECT_EQ(problem.first.batch_stride, 200);
  EXPECT_EQ(problem.out.batch_stride, 15);
  one.inputs.a = operand("a", kSingle, {3, 7});
  EXPECT_EQ(problem_of(one).second.batch_stride, 0);
  one.inputs.b = operand("b", kSingle, {4, 7, 5}, {-35, 5, 1});
  EXPECT_TRUE(contains(lt_says(one), "'b' has a negative batch stride")) << lt_says(one);
}

TEST(CublasProblem, ColumnsOfOneMatrixAreWellApart) {
  // One row of `a`: its stride means nothing, and a multiple of 16 lets cuBLAS load wide words.
  const MatmulProblem problem = problem_of(plain(kHalf, 1, 5, 7));
  EXPECT_EQ(problem.second.columns, 1);
  EXPECT_EQ(problem.second.leading, 16);
  EXPECT_EQ(problem.out.leading, 16);
}

TEST(CublasProblem, WithoutInnerDimensionBothOperandsAreZeros) {
  Case one = plain(kHalf, 300, 5, 0);
  const MatmulProblem problem = problem_of(one);
  EXPECT_EQ(problem.k, 16);
  EXPECT_EQ(problem.zero_bytes, 9728U);  // 300 x 16 halves, in whole 256 bytes
  EXPECT_EQ(problem.second.columns, 300);
  EXPECT_FALSE(problem.empty());
  EXPECT_TRUE(problem_of(plain(kHalf, 0, 5, 7)).empty());
  EXPECT_TRUE(problem_of(plain(kHalf, 5, 0, 7)).empty());
}

TEST(CublasProblem, KnowsHowOperandsAreAligned) {
  Case one = plain(kHalf, 8, 8, 8);
  one.inputs.a.data = reinterpret_cast<void*>(0x10002);
  one.inputs.b.data = reinterpret_cast<void*>(0x10010);
  const MatmulProblem problem = problem_of(one);
  EXPECT_EQ(problem.second.alignment, 2U);
  EXPECT_EQ(problem.first.alignment, 16U);
  EXPECT_EQ(problem.out.alignment, 256U);
  one.inputs.a.data = reinterpret_cast<void*>(0x10001);
  EXPECT_THROW((void)problem_of(one), InputError);
}

TEST(CublasProblem, RefusesWhatDoesNotFit32Bits) {
  const std::int64_t large = std::int64_t{1} << 31U;
  EXPECT_TRUE(contains(lt_says(plain(kHalf, large, 8, 8)), "m is 2147483648"));
  EXPECT_TRUE(contains(lt_says(plain(kHalf, 8, large, 8)), "n is 2147483648"));
  EXPECT_TRUE(contains(lt_says(plain(kHalf, 8, 8, large)), "k is 2147483648"));
  EXPECT_EQ(lt_says(plain(kHalf, large - 1, 8, 8)), "yes");
}

TEST(CublasProblem, TypesDependOnTheDevice) {
  for (const DType dtype : {kHalf, kBfloat, kSingle, kDouble}) {
    EXPECT_EQ(lt_says(plain(dtype, 8, 8, 8)), "yes") << to_string(dtype);
    EXPECT_EQ(gemm_says(plain(dtype, 8, 8, 8)), "yes") << to_string(dtype);
  }
  EXPECT_TRUE(contains(lt_says(plain(kBfloat, 8, 8, 8), device_of(7, 5)), "8.0"));
  EXPECT_EQ(lt_says(plain(kHalf, 8, 8, 8), device_of(7, 5)), "yes");
  EXPECT_TRUE(contains(lt_says(fp8(16, 16, 16), device_of(8, 6)), "8.9"));
  EXPECT_EQ(lt_says(fp8(16, 16, 16), device_of(8, 9)), "yes");
  Case wide = plain(kHalf, 8, 8, 8);
  wide.options.out_dtype = kSingle;
  EXPECT_EQ(lt_says(wide), "yes");
  EXPECT_EQ(problem_of(wide).out.element, Element::kFp32);
}

TEST(CublasProblem, Tf32OnlyWhereItIsAllowed) {
  Case one = plain(kSingle, 8, 8, 8);
  EXPECT_FALSE(problem_of(one).tf32);
  one.options.allow_tf32 = true;
  EXPECT_TRUE(problem_of(one).tf32);
  MatmulProblem problem;
  ASSERT_TRUE(cublas::describe_matmul(one.desc(), device_of(7, 5), problem).ok);
  EXPECT_FALSE(problem.tf32);
}

TEST(CublasProblem, EpiloguesThatCublasLtHas) {
  Case one = plain(kHalf, 8, 8, 8);
  one.inputs.bias = operand("bias", kHalf, {8});
  for (const Activation activation :
       {Activation::kNone, Activation::kRelu, Activation::kGeluTanh}) {
    one.options.activation = activation;
    EXPECT_EQ(lt_says(one), "yes") << to_string(activation);
    EXPECT_TRUE(contains(gemm_says(one), "cublas.cublasLt")) << gemm_says(one);
  }
  one.options.activation = Activation::kGelu;
  EXPECT_TRUE(contains(lt_says(one), "by tanh only")) << lt_says(one);
  one.options.activation = Activation::kSilu;
  EXPECT_TRUE(contains(lt_says(one), "no SiLU")) << lt_says(one);
  one.options.activation = Activation::kNone;
  one.inputs.bias = operand("bias", kHalf, {8}, {2});
  EXPECT_TRUE(contains(lt_says(one), "must be contiguous")) << lt_says(one);

  Case wide = plain(kDouble, 8, 8, 8);
  wide.inputs.bias = operand("bias", kDouble, {8});
  EXPECT_EQ(lt_says(wide), "yes");
  wide.options.activation = Activation::kGeluTanh;
  EXPECT_TRUE(contains(lt_says(wide), "float64")) << lt_says(wide);
}

TEST(CublasProblem, Fp8NeedsItsLayout) {
  EXPECT_EQ(lt_says(fp8(3, 16, 32)), "yes");
  EXPECT_EQ(lt_says(fp8(3, 24, 32)), "yes");  // 48 bytes a row of bfloat16
  EXPECT_TRUE(contains(lt_says(fp8(3, 20, 32)), "multiples of 16")) << lt_says(fp8(3, 20, 32));
  EXPECT_TRUE(contains(lt_says(fp8(3, 16, 24)), "k is 24")) << lt_says(fp8(3, 16, 24));
  Case one = fp8(16, 16, 32);
  EXPECT_TRUE(contains(gemm_says(one), "no float8")) << gemm_says(one);
  one.inputs.b = operand("b", kFp8, {32, 16});
  EXPECT_TRUE(contains(lt_says(one), "contiguous k")) << lt_says(one);
  EXPECT_EQ(lt_says(one, device_of(10, 0)), "yes");
  one = fp8(16, 16, 32);
  one.inputs.a.data = reinterpret_cast<void*>(0x10008);
  EXPECT_TRUE(contains(lt_says(one), "'a'")) << lt_says(one);
  one = fp8(16, 16, 32);
  one.inputs.scale_a = operand("scale_a", kSingle, {1});
  EXPECT_TRUE(problem_of(one).scale_a);
  EXPECT_FALSE(problem_of(one).scale_b);
  // With a result of fp32, cuBLASLt adds a bias of bf16.
  one.options.out_dtype = kSingle;
  one.inputs.bias = operand("bias", kSingle, {16});
  EXPECT_TRUE(contains(lt_says(one), "bias of bfloat16")) << lt_says(one);
  one.inputs.bias = operand("bias", kBfloat, {16});
  EXPECT_EQ(lt_says(one), "yes");
}

TEST(CublasLtConfig, IsReadAsItIsWritten) {
  LtConfig config;
  config.algo = 66;
  config.tile = 393;
  config.stages = 35;
  config.splitk = -1;
  config.reduction = 2;
  config.custom = 7;
  config.cluster = 5;
  config.workspace = std::uint64_t{33} << 20U;
  EXPECT_EQ(cublas::parse_lt_config(to_string(config)), config);
  EXPECT_EQ(to_string(config),
            "algo=66,tile=393,stages=35,splitk=-1,reduction=2,swizzle=0,custom=7,inner=0,cluster=5,"
            "workspace=34603008");
  const LtConfig few = cublas::parse_lt_config("tile=3,algo=1");
  EXPECT_EQ(few.algo, 1);
  EXPECT_EQ(few.tile, 3U);
  EXPECT_EQ(few.splitk, 1);
}

TEST(CublasLtConfig, SaysWhatIsWrong) {
  const auto message = [](std::string_view text) -> std::string {
    try {
      (void)cublas::parse_lt_config(text);
    } catch (const InputError& error) {
      return error.what();
    }
    return "taken";
  };
  EXPECT_TRUE(contains(message("rubbish"), "'rubbish' is no name=number"));
  EXPECT_TRUE(contains(message(""), "'algo' is missing"));
  EXPECT_TRUE(contains(message("tile=3"), "'algo' is missing"));
  EXPECT_TRUE(contains(message("algo=1,algo=2"), "'algo' is given twice"));
  EXPECT_TRUE(contains(message("algo=1,tiles=2"), "'tiles' is not known"));
  EXPECT_TRUE(contains(message("algo=1,"), "ends with a comma"));
  EXPECT_TRUE(contains(message("algo=1,,tile=2"), "'' is no name=number"));
  for (const char* text : {"algo=", "algo=x", "algo=1x", "algo= 1", "algo=99999999999",
                           "algo=1,tile=-1", "algo=1,cluster=70000"}) {
    EXPECT_TRUE(contains(message(text), "is no value for")) << text << ": " << message(text);
  }
}

#if defined(XPURUNTIME_WITH_CUBLAS)

TEST(CublasBackend, KernelsAreKnownByIdAndFamily) {
  KernelRegistry registry(false);
  register_cublas(registry);
  ASSERT_EQ(registry.kernels(OpKind::kMatmul).size(), 2U);
  ASSERT_EQ(registry.find(OpKind::kMatmul, "cublasLt").size(), 1U);
  EXPECT_EQ(registry.find(OpKind::kMatmul, "cublasLt")[0]->id(), "cublas.cublasLt");
  EXPECT_EQ(registry.find(OpKind::kMatmul, "cublas.cublas").size(), 1U);
  EXPECT_EQ(registry.find(OpKind::kMatmul, "cublas").size(), 2U);
}

TEST(CublasBackend, AConfigurationIsReadBeforeAnythingIsLoaded) {
  KernelRegistry registry(false);
  register_cublas(registry);
  const OpDesc op = plain(kHalf, 8, 8, 8).desc();
  for (const auto& kernel : registry.kernels(OpKind::kMatmul)) {
    EXPECT_THROW((void)kernel->prepare(op, device_of(9, 0), "rubbish"), InputError) << kernel->id();
  }
}

TEST(CublasBackend, AProductWithoutElementsNeedsNoLibrary) {
  KernelRegistry registry(false);
  register_cublas(registry);
  const OpDesc op = plain(kHalf, 0, 8, 8).desc();
  for (const auto& kernel : registry.kernels(OpKind::kMatmul)) {
    const auto prepared = kernel->prepare(op, device_of(9, 0), "");
    EXPECT_EQ(prepared->workspace_bytes(), 0U);
    void* operands[slots::Matmul::kCount] = {};
    prepared->launch(operands, nullptr, 0);
  }
}

#endif

}  // namespace
}  // namespace xpuruntime
