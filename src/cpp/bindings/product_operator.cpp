// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include "product_operator.h"

#include "torch_shim.h"

namespace xpuruntime::bindings {

ProductOperator::ProductOperator(const std::string& name, const std::string& key)
    : packet(name.substr(0, name.find('.'))) {
  const std::string overload = name.substr(packet.size());
  into = overload == ".out";
  adds = packet == "addmm" || packet == "baddbmm";
  const bool known = adds || packet == "mm" || packet == "bmm";
  if (!known || (!into && !overload.empty())) return;
  const std::string device = key == "CUDA" ? "cuda" : key == "CPU" ? "cpu" : "";
  if (device.empty()) return;
  kernel = find_loaded(("libtorch_" + device + ".so").c_str(),
                       ("aoti_torch_" + device + "_" + packet + "_out").c_str());
}

}  // namespace xpuruntime::bindings
