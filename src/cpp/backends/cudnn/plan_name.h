// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#pragma once

#include <string>
#include <string_view>

namespace xpuruntime::cudnn {

/// A plan by the number of its engine and the choices of its knobs, as cuDNN numbers them:
/// "eng4_k2=1_k3=0". Returns `text` when it has this form. Throws InputError otherwise.
std::string check_plan_name(std::string_view text);

}  // namespace xpuruntime::cudnn
