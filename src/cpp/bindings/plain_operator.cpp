// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "plain_operator.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "operator_call.h"
#include "plain_kernel.h"
#include "sdpa_turn.h"
#include "torch_cxx.h"

namespace py = pybind11;

namespace xpuruntime::bindings {
namespace {

constexpr std::array<std::string_view, 5> kNames = {
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "scaled_dot_product_attention"};
constexpr std::array<std::string_view, 3> kKeys = {"CPU", "CUDA", "CompositeImplicitAutograd"};
constexpr std::size_t kSlots = kNames.size() * kKeys.size();

struct Slot {
  std::atomic<OperatorGate*> gate{nullptr};
  NativeKernel native;  // which takes values of PyTorch's interpreter
};

std::array<Slot, kSlots> slots;

void put(OperatorCall& call, std::size_t at, const void* tensor) {
  call.put_tensor(at, const_cast<void*>(tensor));
}

void put(OperatorCall& call, std::size_t at, const OptionalTensor& tensor) {
  if (tensor.given) call.put_optional(at, static_cast<void*>(const_cast<void**>(&tensor.object)));
}

void put(OperatorCall& call, std::size_t at, const IntegerList& values) {
  call.put_integers(at, {values.data, values.size});
}

template <std::size_t kCount>
void put(OperatorCall& call, std::size_t at, const std::array<bool, kCount>& mask) {
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < kCount; ++i) bits |= (mask[i] ? 1U : 0U) << i;
  call.put_bits(at, bits, kCount);
}

void put(OperatorCall& call, std::size_t at, bool flag) { call.put_bits(at, flag ? 1 : 0, 1); }

void put(OperatorCall& call, std::size_t at, double number) { call.put_number(at, number); }

void put(OperatorCall& call, std::size_t at, const std::optional<double>& number) {
  if (number) call.put_number(at, *number);
}

template <typename Result>
Result results(OperatorCall& call) {
  if constexpr (std::is_same_v<Result, OneTensor>) {
    return ReturnedTensor::of(call.release(0));
  } else {
    return [&call]<std::size_t... kAt>(std::index_sequence<kAt...> /*each*/) {
      return Result{ReturnedTensor::of(call.release(kAt))...};
    }(std::make_index_sequence<std::tuple_size_v<Result>>());
  }
}

template <std::size_t kSlot, typename Result, typename... Arguments>
struct Form {
  static Result enter(void* /*functor*/, TorchKeys /*keys*/, Arguments... arguments) {
    OperatorGate& gate = *slots[kSlot].gate.load(std::memory_order_acquire);
    OperatorCall call(gate.signature());
    std::size_t at = 0;
    (put(call, at++, arguments), ...);
    CallFacts facts(gate.number());
    const bool seen = gate.sees(call, facts);
    if (const auto wish = seen ? gate.known(facts) : std::nullopt) {
      const auto function = reinterpret_cast<Result (*)(Arguments...)>(gate.function());
      if (!gate.takes_turns()) return function(arguments...);
      const SdpaTurn turn(*wish);
      return function(arguments...);
    }
    gate.ask(call, seen ? &facts : nullptr);
    return results<Result>(call);
  }
  static void* function() { return reinterpret_cast<void*>(enter); }
};

template <std::size_t kSlot>
void boxed(void* /*functor*/, const void* op, TorchKeys keys, void* stack) {
  slots[kSlot].native.run_boxed(op, keys, stack);
}

template <std::size_t kSlot>
TorchFunctions functions_of() {
  using Tensor = const void*;
  using Optional = const OptionalTensor&;
  constexpr std::size_t kName = kSlot / kKeys.size();
  TorchFunctions functions;
  functions.boxed = reinterpret_cast<void*>(boxed<kSlot>);
  if constexpr (kName == 0) {
    functions.plain =
        Form<kSlot, ThreeTensors, Tensor, IntegerList, Optional, Optional, double>::function();
  } else if constexpr (kName == 1) {
    functions.plain = Form<kSlot, ThreeTensors, Tensor, Tensor, IntegerList, Tensor, Tensor,
                           Optional, Optional, std::array<bool, 3>>::function();
  } else if constexpr (kName == 2) {
    functions.plain =
        Form<kSlot, TwoTensors, Tensor, IntegerList, Optional, std::optional<double>>::function();
  } else if constexpr (kName == 3) {
    functions.plain = Form<kSlot, TwoTensors, Tensor, Tensor, IntegerList, Tensor, Optional,
                           std::array<bool, 2>>::function();
  } else {
    functions.plain = Form<kSlot, OneTensor, Tensor, Tensor, Tensor, Optional, double, bool,
                           std::optional<double>, bool>::function();
  }
  return functions;
}

template <std::size_t... kSlot>
std::array<TorchFunctions, kSlots> all_functions(std::index_sequence<kSlot...> /*all*/) {
  return {functions_of<kSlot>()...};
}

}  // namespace

py::object place_plain_operator(const std::string& name, const std::string& key, OperatorGate& gate,
                                const py::object& below) {
  static const auto functions = all_functions(std::make_index_sequence<kSlots>());
  const auto found = place_of(kNames, kKeys, name, key);
  if (!found) return below;
  Slot& slot = slots[*found];
  slot.gate.store(&gate, std::memory_order_release);
  return slot.native.place("aten::" + name, key, {}, functions[*found], below);
}

}  // namespace xpuruntime::bindings
