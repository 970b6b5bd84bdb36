# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `xpuruntime._core` has for `xpuruntime.ops`; there is no module of this name, `_core` itself has all of it.

Arguments are taken by place only, all of them. Their meaning and the errors are those of `xpuruntime.ops`. Integers
come as tuples of the length stated there: two for `stride` and `dilation`, four for `padding`, one for `groups`.
"""

from collections.abc import Sequence
from typing import Any

from xpuruntime._core_kernels import CallSite

def op_matmul(
    site: CallSite,
    a: Any,
    b: Any,
    bias: Any,
    scale_a: Any,
    scale_b: Any,
    out: Any,
    activation: str | None,
    out_dtype: str | None,
    allow_tf32: bool,
    deterministic: bool,
    phase: str | None,
    stream: Any,
    /,
) -> Any: ...
def op_attention(
    site: CallSite,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    rng: Any,
    out: Any,
    return_lse: bool,
    is_causal: bool | str,
    scale: float | None,
    dropout_p: float,
    allow_tf32: bool,
    deterministic: bool,
    phase: str | None,
    stream: Any,
    /,
) -> Any: ...
def op_attention_backward(
    site: CallSite,
    grad_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    mask: Any,
    rng: Any,
    grad_q: Any,
    grad_k: Any,
    grad_v: Any,
    is_causal: bool | str,
    scale: float | None,
    dropout_p: float,
    allow_tf32: bool,
    deterministic: bool,
    stream: Any,
    /,
) -> tuple[Any, Any, Any]: ...
def op_norm(
    site: CallSite,
    rms: bool,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    out: Any,
    sum_out: Any,
    return_sum: bool,
    return_stats: bool,
    eps: float,
    deterministic: bool,
    phase: str | None,
    stream: Any,
    /,
) -> Any: ...
def op_norm_backward(
    site: CallSite,
    rms: bool,
    grad_out: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    grad_sum: Any,
    grad_x: Any,
    want_weight: bool,
    want_bias: bool,
    deterministic: bool,
    stream: Any,
    /,
) -> Any: ...
def op_conv2d(
    site: CallSite,
    x: Any,
    weight: Any,
    bias: Any,
    out: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: Sequence[int],
    activation: str | None,
    allow_tf32: bool,
    deterministic: bool,
    phase: str | None,
    stream: Any,
    /,
) -> Any: ...
