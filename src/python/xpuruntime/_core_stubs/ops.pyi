# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `xpuruntime._core` has for `xpuruntime.ops`.

Arguments are taken by place only, all of them. Their meaning and the errors are those of `xpuruntime.ops`. Integers
come as tuples of the length stated there: two for `stride` and `dilation`, four for `padding`, one for `groups`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from xpuruntime._core import CallSite

class CallContext:
    """Where a call stands: the site of its policy, and what the policy says beyond kernels. Immutable.

    With `below_autograd` the caller is a kernel below autograd, and arrays that require a gradient are taken.
    """

    def __init__(
        self, site: CallSite, *, allow_tf32: bool, deterministic: bool, below_autograd: bool = False
    ) -> None: ...
    @property
    def site(self) -> CallSite: ...
    @property
    def allow_tf32(self) -> bool: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def below_autograd(self) -> bool: ...

#: Function to the names of its parameters, in their order.
OP_PARAMETERS: dict[str, tuple[str, ...]]

def op_matmul(
    context: CallContext,
    a: Any,
    b: Any,
    bias: Any,
    scale_a: Any,
    scale_b: Any,
    out: Any,
    activation: str | None,
    out_dtype: str | None,
    phase: str | None,
    stream: Any,
    /,
) -> Any: ...
def op_attention(
    context: CallContext,
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
    phase: str | None,
    stream: Any,
    /,
) -> Any: ...
def op_attention_backward(
    context: CallContext,
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
    stream: Any,
    /,
) -> tuple[Any, Any, Any]: ...
def op_norm(
    context: CallContext,
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
    phase: str | None,
    stream: Any,
    /,
) -> Any: ...
def op_norm_backward(
    context: CallContext,
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
    stream: Any,
    /,
) -> Any: ...
def op_conv2d(
    context: CallContext,
    x: Any,
    weight: Any,
    bias: Any,
    out: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: Sequence[int],
    activation: str | None,
    phase: str | None,
    stream: Any,
    /,
) -> Any: ...
def op_conv2d_input_gradient(
    context: CallContext,
    grad_out: Any,
    weight: Any,
    grad_x: Any,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: Sequence[int],
    stream: Any,
    /,
) -> Any: ...
def op_conv2d_weight_gradient(
    context: CallContext,
    grad_out: Any,
    x: Any,
    grad_weight: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: Sequence[int],
    stream: Any,
    /,
) -> Any: ...
def attention_kind(name: str, /, *arrays: Any) -> bytes | None:
    """Return what is left of a call of attention without its lengths, as a key; ``None`` where they count."""

def call_key(name: str, /, *arrays: Any) -> bytes | None:
    """Return everything that a kernel depends on of a call's arrays: shapes, strides, dtypes, devices, alignment.

    Arrays that require a gradient are taken. ``None`` where one of them cannot be seen, or they have many dimensions.
    """

def make_guard(name: str, slow: Callable[..., Any], native: Any) -> Callable[..., Any]:
    """Return what stands for a product: see `xpuruntime.pytorch.dispatch.overrides.fast_kernels`.

    It is called with a keyset, arrays, and at most `out`. It calls ``native.call`` where no policy holds, or the route
    under the key of the call has no `place`; ``native`` itself where that has been invalidated; `op_matmul` where the
    route is `quick`; and `slow` otherwise.
    """

def set_guards(
    routes: dict[Any, Any] | None, kinds: dict[Any, Any] | None, *, slow: bool, phases: bool, modules: bool
) -> None:
    """Say what holds for all guards: the routes of the policy, if any, and whether `slow` looks at every call.

    `phases` and `modules` say whether rules ask for the phase of a call, and for its module. Where one of them does,
    both follow the key of a call's arrays in the keys of `routes`, and are empty where no rule asks for them.
    """

def call_phase() -> str:
    """Return ``"train"``, ``"backward"``, ``"infer"``, ``"prefill"`` or ``"decode"`` for the call of this thread."""

def set_generation_phase(phase: str) -> str:
    """Say what inference in this thread is from now on: ``"prefill"``, ``"decode"`` or nothing. Returns the former."""

def node_thread() -> int:
    """Return the number by which nodes of autograd that this thread makes are distinguished from those of others."""

def enter_function(phase: str, backward: int) -> None:
    """Say that the forward of a ``torch.autograd.Function`` begins in this thread, and of which phase it is.

    `backward`: the one that this thread runs, by PyTorch's number, or -1.
    """

def leave_function() -> None:
    """Say that it ends."""

def enter_module(path: str, module: object | None = None) -> None:
    """Say that the forward of a module begins in this thread, called by what called the function that calls this.

    It has ended when that function has, also where an interruption has kept anybody from saying so.
    """

def leave_module(module: object | None = None) -> None:
    """Say that it ends."""

def running_modules() -> int:
    """Return how many modules run in this thread, each inside of the one before it."""

def outer_module() -> str | None:
    """Return the path of the module around the one whose hook asks before it calls `enter_module`, if any."""

def running_module() -> str | None:
    """Return the path of the innermost module that runs in this thread, if any."""

def call_module(recorded: bool | None = None) -> str:
    """Return the path of the module that the call that runs in this thread belongs to; empty where it is not known.

    In a forward the innermost one that runs, in a backward the one in whose forward the node that runs was made.
    `recorded`: whether gradients are, if PyTorch does not say it.
    """

def enter_call(phase: str, path: str | None, graph: str) -> None:
    """Say that a call of compiled code begins in this thread whose phase and module are stated.

    They are what `call_phase` and `call_module` return until `leave_call`, which find them for themselves where it is
    an empty phase, or no path. Calls nest.

    Parameters
    ----------
    phase : str
    path : str, optional
        From the module whose compiled code runs.
    graph : {"forward", "backward", "inference"}
        What the code computes. A forward takes a note of its module for its backward.

    Raises
    ------
    ValueError
        There is no such phase.
    """

def leave_call() -> None:
    """Say that it ends."""

def forget_native_calls() -> None:
    """Have guards look anew which calls are native, since a route has changed."""

def torch_guards() -> Any:
    """Return the functions that the addon for PyTorch calls, in a capsule."""

def use_torch_addon(functions: Any) -> None:
    """Take what PyTorch knows of a call from the addon with these functions; ``None``: from Python.

    Raises
    ------
    ImportError
        The addon was built for another core.
    """

def find_stable_abi(to_python: Callable[[list[Any]], list[Any]], to_handle: Callable[[list[Any]], list[Any]]) -> str:
    """Find PyTorch's stable C ABI. Returns the first function that is missing, or nothing.

    `to_python` makes tensors of capsules of handles, which it owns from then on; `to_handle` the other way round. Both
    are functions in C: one in Python could be interrupted after a handle has changed its owner.
    """

def place_stable_kernel(
    name: str, key: str, slow: Callable[..., Any], native: Any, keyset: Any
) -> Callable[[], None] | None:
    """Put a kernel in C over ``mm`` or ``bmm``. Returns what removes it; ``None`` where it has none.

    It is given what `make_guard` is, and does the same. `slow` and `native` are called with `keyset`, then the
    operands.
    """

def place_raising_kernel(space: str, name: str) -> Callable[[], None] | None:
    """Put a kernel in C that raises LookupError in an operator's place for the CPU. Returns what removes it."""

def use_sdp_switches(read: tuple[Callable[[], bool], ...], write: tuple[Callable[[bool], None], ...]) -> None:
    """Say what reads and writes PyTorch's SDP backends, by their numbers, where there is no addon.

    Functions in C that let no other thread have the GIL.
    """

def after_fork_in_sdp_backend_scope() -> None:
    """Say that this is a child process, in which the scopes of other threads are over."""

class SdpBackendScope:
    """A block in which these switches are as a call of attention in this thread wants them.

    `request`: 0, as the program has set them, or within another scope as that one has them; else 1 more than the number
    of the one backend that is to be enabled, and 8 more where it is to be so only if the program has it enabled. Other
    threads that want the same go on; those that want something else wait.
    """

    def __init__(self, request: int) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *raised: object) -> None: ...

def in_sdp_backend_scope() -> bool:
    """Say whether this thread is in such a block, or in an attention that a guard has called."""

def measure_choose() -> dict[str, float]: ...
