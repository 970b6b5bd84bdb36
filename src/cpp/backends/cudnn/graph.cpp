// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "cudnn/graph.h"

#include <algorithm>
#include <array>
#include <span>
#include <unordered_set>
#include <utility>

#include "cudnn/conv_rules.h"
#include "cudnn/frontend.h"
#include "cudnn/tensor_rules.h"
#include "xpuruntime/error.h"

namespace xpuruntime::cudnn {
namespace {

namespace fe = ::cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// More than this is not worth a convolution's time: such plans are transforms of the whole input.
constexpr std::int64_t kConvWorkspace = std::int64_t{1} << 30;

fe::DataType_t data_type(DType dtype) noexcept {
  if (dtype == DType{2, 16, 1}) return fe::DataType_t::HALF;
  if (dtype == DType{4, 16, 1}) return fe::DataType_t::BFLOAT16;
  if (dtype == DType{0, 64, 1}) return fe::DataType_t::INT64;
  return fe::DataType_t::FLOAT;
}

// cuDNN's text as part of a sentence, without the dumps of engines that it comes with.
std::string one_line(const std::string& text) {
  if (text.starts_with("No valid engine configs")) {
    return "no engine takes these types, shapes, strides and fused operations together (with "
           "CUDNN_LOGLEVEL_DBG=2 and CUDNN_LOGDEST_DBG=stderr it prints why, for each engine)";
  }
  constexpr std::size_t kMost = 400;
  std::string line;
  for (std::size_t start = 0; start < text.size();) {
    const std::size_t end = std::min(text.find('\n', start), text.size());
    const std::string_view part = std::string_view(text).substr(start, end - start);
    if (!part.empty() && !part.starts_with('{')) line.append(line.empty() ? "" : "; ").append(part);
    start = end + 1;
  }
  if (line.size() > kMost) line.replace(kMost, std::string::npos, "...");
  return line;
}

[[noreturn]] void refuse(const OpDesc& op, const std::string& reason) {
  throw UnsupportedOperationError(
      Library::get().name() + " cannot do " + describe(op) + ": " + one_line(reason),
      to_string(op.device));
}

}  // namespace

struct Graph::State {
  struct Binding {
    std::size_t slot;
    std::size_t offset;  // in bytes
  };

  State(const OpDesc& of, Search search, Handle handle) : op(of) {
    graph.set_io_data_type(data_type(op[0].dtype))
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    switch (op.kind) {
      case OpKind::kAttention:
        add_attention();
        break;
      case OpKind::kAttentionBackward:
        add_attention_backward();
        break;
      case OpKind::kConvInputGradient:
        add_conv_input_gradient();
        break;
      case OpKind::kConvWeightGradient:
        add_conv_weight_gradient();
        break;
      default:
        add_conv();
    }
    require(graph.validate());
    require(graph.build_operation_graph(static_cast<cudnnHandle_t>(handle)));
    require(graph.create_execution_plans(modes(search)));
    filter();
  }

  void require(fe::error_t status) const {
    if (status.is_bad()) refuse(op, status.get_message());
  }

  std::vector<fe::HeurMode_t> modes(Search search) const {
    using Mode = fe::HeurMode_t;
    switch (search) {
      case Search::kQuick:
        return {Mode::A, Mode::FALLBACK};
      case Search::kPrecise:
        return {Mode::B, Mode::FALLBACK};
      case Search::kAll:
        break;
    }
    return {Mode::A, Mode::B, Mode::FALLBACK};
  }

  void filter() {
    if (!is_conv(op.kind)) return;
    using Note = fe::NumericalNote_t;
    graph.deselect_workspace_greater_than(kConvWorkspace);
    // These lose more digits than the dtype has to lose.
    graph.deselect_numeric_notes({Note::WINOGRAD_TILE_13x13, Note::REDUCED_PRECISION_REDUCTION});
    if (is_half(op[0].dtype)) {
      // cuDNN does not tell whether they round the transformed tiles to 16 bits.
      graph.deselect_numeric_notes(
          {Note::WINOGRAD, Note::WINOGRAD_TILE_4x4, Note::WINOGRAD_TILE_6x6, Note::FFT});
    }
    if (is_single(op[0].dtype) && !op.attributes.allow_tf32) {
      graph.deselect_numeric_notes({Note::TENSOR_CORE, Note::DOWN_CONVERT_INPUTS});
    }
    if (op.attributes.deterministic) graph.deselect_numeric_notes({Note::NONDETERMINISTIC});
  }

  /// A tensor in memory. Their numbers grow in the order of `bindings`.
  Tensor bind(std::size_t slot, std::span<const std::int64_t> shape,
              std::span<const std::int64_t> strides, std::size_t offset = 0) {
    const TensorDesc& tensor = op[slot];
    bindings.push_back({slot, offset});
    const auto offset_alignment = static_cast<std::int64_t>(offset == 0 ? 16 : offset);
    auto attributes = fe::graph::Tensor_attributes();
    attributes.set_name(std::string(slot_name(op.kind, slot)) + std::to_string(offset))
        .set_uid(static_cast<std::int64_t>(bindings.size()))
        .set_dim({shape.begin(), shape.end()})
        .set_stride({strides.begin(), strides.end()})
        .set_data_type(data_type(tensor.dtype))
        .set_alignment(std::min({std::int64_t{16}, alignment_of(tensor), offset_alignment}));
    return graph.tensor(attributes);
  }

  Tensor bind(std::size_t slot) { return bind(slot, op[slot].shape, op[slot].strides); }

  Tensor bind_lse(std::size_t slot) {
    const auto& shape = op[slot].shape;
    const std::array<std::int64_t, 4> dims{shape[0], shape[1], shape[2], 1};
    const std::array<std::int64_t, 4> strides{shape[1] * shape[2], shape[2], 1, 1};
    return bind(slot, dims, strides);
  }

  /// One row for all queries is said by a stride of 0: cuDNN's backward misreads a size of 1.
  Tensor bind_mask(std::size_t slot) {
    auto shape = op[slot].shape;
    auto strides = op[slot].strides;
    if (shape[2] == 1) {
      shape[2] = op[op.kind == OpKind::kAttention ? std::size_t{slots::Attention::kQ}
                                                  : std::size_t{slots::AttentionBackward::kQ}]
                     .shape[2];
      strides[2] = 0;
    }
    return bind(slot, shape, strides);
  }

  /// Seed (at byte 0) or offset (at byte 8).
  Tensor bind_rng(std::size_t slot, std::size_t offset) {
    const std::array<std::int64_t, 4> ones{1, 1, 1, 1};
    return bind(slot, ones, ones, offset);
  }

  /// What cuDNN computes into `slot`.
  void bind_output(const Tensor& tensor, std::size_t slot, std::span<const std::int64_t> shape,
                   std::span<const std::int64_t> strides) {
    bindings.push_back({slot, 0});
    tensor->set_output(true)
        .set_uid(static_cast<std::int64_t>(bindings.size()))
        .set_dim({shape.begin(), shape.end()})
        .set_stride({strides.begin(), strides.end()})
        .set_data_type(data_type(op[slot].dtype))
        .set_alignment(std::min(std::int64_t{16}, alignment_of(op[slot])));
  }

  void bind_output(const Tensor& tensor, std::size_t slot) {
    bind_output(tensor, slot, op[slot].shape, op[slot].strides);
  }

  template <typename Attributes>
  void set_causal(Attributes& attributes) const {
    if (op.attributes.causal == Causal::kNone) return;
    attributes
        .set_diagonal_alignment(op.attributes.causal == Causal::kTopLeft
                                    ? fe::DiagonalAlignment_t::TOP_LEFT
                                    : fe::DiagonalAlignment_t::BOTTOM_RIGHT)
        .set_diagonal_band_right_bound(0);
  }

  template <typename Attributes>
  void set_extras(Attributes& attributes, std::size_t mask, std::size_t rng) {
    attributes.set_attn_scale(static_cast<float>(op.attributes.scale));
    set_causal(attributes);
    if (op.has(mask)) attributes.set_bias(bind_mask(mask));
    if (op.attributes.dropout_p > 0.0F) {
      Tensor seed = bind_rng(rng, 0);
      Tensor offset = bind_rng(rng, sizeof(std::int64_t));
      attributes.set_dropout(op.attributes.dropout_p, seed, offset);
    }
  }

  void add_attention() {
    using Slot = slots::Attention;
    const Tensor q = bind(Slot::kQ);
    const Tensor k = bind(Slot::kK);
    const Tensor v = bind(Slot::kV);
    fe::graph::SDPA_attributes attributes;
    attributes.set_name("sdpa").set_generate_stats(op.has(Slot::kLse));
    set_extras(attributes, Slot::kMask, Slot::kRng);
    const auto [out, lse] = graph.sdpa(q, k, v, std::move(attributes));
    bind_output(out, Slot::kOut);
    if (!op.has(Slot::kLse)) return;
    const auto& shape = op[Slot::kLse].shape;
    const std::array<std::int64_t, 4> dims{shape[0], shape[1], shape[2], 1};
    const std::array<std::int64_t, 4> strides{shape[1] * shape[2], shape[2], 1, 1};
    bind_output(lse, Slot::kLse, dims, strides);
  }

  void add_attention_backward() {
    using Slot = slots::AttentionBackward;
    const Tensor grad_out = bind(Slot::kGradOut);
    const Tensor q = bind(Slot::kQ);
    const Tensor k = bind(Slot::kK);
    const Tensor v = bind(Slot::kV);
    const Tensor out = bind(Slot::kOut);
    const Tensor lse = bind_lse(Slot::kLse);
    fe::graph::SDPA_backward_attributes attributes;
    attributes.set_name("sdpa_backward").set_deterministic_algorithm(op.attributes.deterministic);
    set_extras(attributes, Slot::kMask, Slot::kRng);
    const auto [grad_q, grad_k, grad_v] =
        graph.sdpa_backward(q, k, v, out, grad_out, lse, std::move(attributes));
    bind_output(grad_q, Slot::kGradQ);
    bind_output(grad_k, Slot::kGradK);
    bind_output(grad_v, Slot::kGradV);
  }

  Tensor activate(const Tensor& tensor) {
    fe::graph::Pointwise_attributes attributes;
    attributes.set_name("activation");
    switch (op.attributes.activation) {
      case Activation::kNone:
        return tensor;
      case Activation::kRelu:
        attributes.set_mode(fe::PointwiseMode_t::RELU_FWD);
        break;
      case Activation::kGelu:
        attributes.set_mode(fe::PointwiseMode_t::GELU_FWD);
        break;
      case Activation::kGeluTanh:
        attributes.set_mode(fe::PointwiseMode_t::GELU_APPROX_TANH_FWD);
        break;
      case Activation::kSilu:
        attributes.set_mode(fe::PointwiseMode_t::SWISH_FWD).set_swish_beta(1.0F);
    }
    return graph.pointwise(tensor, attributes);
  }

  /// Attributes of a convolution or of a gradient of one.
  template <typename Attributes>
  Attributes window(const char* name) const {
    const OpAttributes& a = op.attributes;
    Attributes attributes;
    attributes.set_name(name)
        .set_pre_padding({a.padding[0], a.padding[1]})
        .set_post_padding({a.padding[2], a.padding[3]})
        .set_stride({a.stride[0], a.stride[1]})
        .set_dilation({a.dilation[0], a.dilation[1]});
    return attributes;
  }

  void add_conv_input_gradient() {
    using Slot = slots::ConvInputGradient;
    const ConvStrides strides = conv_strides(op);
    const Tensor grad_out = bind(Slot::kGradOut, op[Slot::kGradOut].shape, strides.out);
    const Tensor weight = bind(Slot::kWeight, op[Slot::kWeight].shape, strides.weight);
    const Tensor grad_x =
        graph.conv_dgrad(grad_out, weight, window<fe::graph::Conv_dgrad_attributes>("dgrad"));
    bind_output(grad_x, Slot::kGradX, op[Slot::kGradX].shape, strides.x);
  }

  void add_conv_weight_gradient() {
    using Slot = slots::ConvWeightGradient;
    const ConvStrides strides = conv_strides(op);
    const Tensor grad_out = bind(Slot::kGradOut, op[Slot::kGradOut].shape, strides.out);
    const Tensor x = bind(Slot::kX, op[Slot::kX].shape, strides.x);
    const Tensor grad_weight =
        graph.conv_wgrad(grad_out, x, window<fe::graph::Conv_wgrad_attributes>("wgrad"));
    bind_output(grad_weight, Slot::kGradWeight, op[Slot::kGradWeight].shape, strides.weight);
  }

  void add_conv() {
    using Slot = slots::Conv;
    const ConvStrides strides = conv_strides(op);
    const Tensor x = bind(Slot::kX, op[Slot::kX].shape, strides.x);
    const Tensor weight = bind(Slot::kWeight, op[Slot::kWeight].shape, strides.weight);
    Tensor result = graph.conv_fprop(x, weight, window<fe::graph::Conv_fprop_attributes>("conv"));
    const auto shape = std::span(op[Slot::kOut].shape);
    const auto virtual_like_out = [&](const Tensor& tensor) {
      tensor->set_dim({shape.begin(), shape.end()})
          .set_stride({strides.out.begin(), strides.out.end()});
    };
    if (op.has(Slot::kBias)) {
      virtual_like_out(result);
      const std::int64_t channels = op[Slot::kBias].shape[0];
      const std::array<std::int64_t, 4> dims{1, channels, 1, 1};
      const std::array<std::int64_t, 4> bias_strides{channels, 1, channels, channels};
      const Tensor bias = bind(Slot::kBias, dims, bias_strides);
      result = graph.pointwise(
          result, bias,
          fe::graph::Pointwise_attributes().set_name("bias").set_mode(fe::PointwiseMode_t::ADD));
    }
    if (op.attributes.activation != Activation::kNone) virtual_like_out(result);
    result = activate(result);
    bind_output(result, Slot::kOut, shape, strides.out);
  }

  const OpDesc op;
  fe::graph::Graph graph;
  std::vector<Binding> bindings;
  // Of each plan: where it stands in the list of cudnn-frontend, which may name one several times.
  std::vector<std::int64_t> places;
};

Graph::Graph(const OpDesc& op, Search search, Handle handle) {
  try {
    state_ = std::make_unique<State>(op, search, handle);
    std::unordered_set<std::string> seen;
    const std::int64_t count = state_->graph.get_execution_plan_count();
    for (std::int64_t i = 0; i < count; ++i) {
      std::string name;
      state_->require(state_->graph.get_plan_name_at_index(i, name));
      const std::size_t start = name.find("eng");
      if (start != std::string::npos) name.erase(0, start);
      if (!seen.insert(name).second) continue;
      names_.push_back(std::move(name));
      state_->places.push_back(i);
    }
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    refuse(op, error.what());
  }
}

Graph::~Graph() = default;

std::string Graph::build(std::size_t plan) {
  try {
    fe::error_t status = state_->graph.build_plan_at_index(state_->places[plan]);
    return status.is_good() ? std::string() : one_line(status.get_message());
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return one_line(error.what());
  }
}

std::size_t Graph::workspace_bytes(std::size_t plan) const {
  std::int64_t bytes = 0;
  state_->require(state_->graph.get_workspace_size_plan_at_index(state_->places[plan], bytes));
  return static_cast<std::size_t>(std::max<std::int64_t>(bytes, 0));
}

bool Graph::repeatable(std::size_t plan) {
  if (state_->op.kind == OpKind::kAttention) return true;
  if (state_->op.kind == OpKind::kAttentionBackward) return state_->op.attributes.deterministic;
  // A plan that is built already is refused again once its note is ruled out.
  state_->graph.deselect_numeric_notes({fe::NumericalNote_t::NONDETERMINISTIC});
  return build(plan).empty();
}

void Graph::execute(std::size_t plan, Handle handle, void* const* operands, void* workspace) const {
  std::array<void*, kMaxSlots + 1> pointers{};
  const std::vector<State::Binding>& bindings = state_->bindings;
  for (std::size_t i = 0; i < bindings.size(); ++i) {
    pointers[i] = static_cast<std::byte*>(operands[bindings[i].slot]) + bindings[i].offset;
  }
  std::string reason;
  try {
    fe::error_t status = state_->graph.execute_plan_at_index(
        static_cast<cudnnHandle_t>(handle), pointers.data(), static_cast<int>(bindings.size()),
        workspace, state_->places[plan]);
    if (status.is_good()) return;
    reason = status.get_message();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  const std::string device = to_string(state_->op.device);
  throw CudaError(
      "cuDNN could not launch " + describe(state_->op) + " on " + device + ": " + one_line(reason),
      device, 0);
}

}  // namespace xpuruntime::cudnn
