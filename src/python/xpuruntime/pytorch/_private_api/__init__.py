# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Private API of PyTorch: every name that it does not promise to keep, why it is used, and what is done without it.

Nothing outside of this folder uses such a name. Each is taken when this module is imported, or on first use where its
module takes seconds to import. `lookup` has the table, the texts that are read and the private state of FSDP2, and
`attributes` the private names of PyTorch's objects.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.pytorch._private_api import attributes
from xpuruntime.pytorch._private_api.attributes import *  # noqa: F403 - all that it lists
from xpuruntime.pytorch._private_api.lookup import REFUSES, TABLE, PrivateName, later, reset_fully_sharded, take

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TABLE", "PrivateName", "reset_fully_sharded"]
__all__ += attributes.__all__


# --- autograd

#: The number of the backward that runs in this thread, or -1.
running_backward: Callable[[], int] = take(
    "torch._C._current_graph_task_id",
    "which gives the phase of a call in a backward",
    without="every call that records no gradient is of the phase `infer`",
    otherwise=lambda: -1,
)
#: The hooks on saved tensors that hold in this thread, or `None`.
saved_tensor_hooks: Callable[[bool], Any] = take(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "which tells whether activation checkpointing sees what is measured",
    without="hooks of nobody are assumed, and measuring inside of a checkpoint fails in its recomputation",
    otherwise=lambda _: None,
)
#: The sequence number of the next node of autograd in this thread; the core calls it where there is no addon.
next_node: Callable[[], int] = take(
    "torch.autograd._get_sequence_nr",
    "which gives the module of a node of autograd",
    without="calls of a backward are of no module",
    otherwise=lambda: 0,
)
_running_node: Callable[[], Any] = take(
    "torch._C._current_autograd_node",
    "which gives the module of a call in a backward",
    without="calls of a backward are of no module",
    otherwise=lambda: None,
)
#: The attribute in which a node of a `torch.autograd.Function` has the number of its thread.
NODE_THREAD = "xpuruntime_thread"


class RunningNode(NamedTuple):
    """A node of autograd: its sequence number, and the thread that has made it where that is noted."""

    number: int
    thread: int | None


def running_node() -> RunningNode | None:
    """Return the node of autograd that runs in this thread."""
    node = _running_node()
    return None if node is None else RunningNode(node._sequence_nr(), getattr(node, NODE_THREAD, None))


#: The base of `torch.autograd.Function` without its checks for ``torch.func``.
SingleLevelFunction: Any = take(
    "torch.autograd.function._SingleLevelFunction",
    "through which every autograd.Function passes",
    without="`torch.autograd.Function` stands for it",
    otherwise=torch.autograd.Function,
)
#: What ``apply`` looks up in a function's class, from 2.14 on, while gradients are still recorded as around the call.
NODE_CLASS = "_backward_cls"
TABLE.append(
    PrivateName(
        f"torch.autograd.Function.{NODE_CLASS}",
        "which shows where the call of a function begins",
        "calls in the forward of a function are of the phase `infer`",
    )
)
#: A context in which such a function may be applied inside of ``torch.func``.
single_level_functions: Any = take(
    "torch._functorch.utils.enable_single_level_autograd_function",
    "without which attention has no gradient inside of torch.func",
    without="such gradients are refused by PyTorch",
    otherwise=contextlib.nullcontext,
)
any_requires_grad: Callable[..., bool] = take(
    "torch._C._any_requires_grad",
    "which looks at tensors in lists as well",
    without="every tensor is asked",
    otherwise=lambda *args: any(isinstance(x, torch.Tensor) and x.requires_grad for x in args),
)

# --- the dispatcher

dispatch_keyset: Any = take("torch._C.DispatchKeySet", "with which kernels are called")
_dispatch_keys: Any = take("torch._C.DispatchKey", "by which kernels are placed")
keyset_after_autograd: Any = take("torch._C._after_autograd_keyset", "with which an operator goes on below autograd")
below_autograd: Any = take("torch._C._AutoDispatchBelowAutograd", "in which an operator goes on below autograd")
without_keys: Any = take("torch._C._ExcludeDispatchKeyGuard", "in which autocast leaves an operator alone")
with_keys: Any = take("torch._C._ForceDispatchKeyGuard", "in which kernels for devices see what autograd sees")
excluded_keys: Callable[[], Any] = take("torch._C._dispatch_tls_local_exclude_set", "which kernels for devices need")
included_keys: Callable[[], Any] = take("torch._C._dispatch_tls_local_include_set", "which kernels for devices need")
has_kernel: Callable[[str, str], bool] = take(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "which distinguishes composite operators from others"
)
computes_at: Callable[[str, str], bool] = take(
    "torch._C._dispatch_has_computed_kernel_for_dispatch_key", "which says where an operator has a kernel to replace"
)
operator_names: Callable[[], list[str]] = take(
    "torch._C._dispatch_get_all_op_names",
    "which finds operators of other packages",
    without="a strict policy refuses none of them before they run",
    otherwise=list,
)
dispatch_table: Callable[[str], str] = take(
    "torch._C._dispatch_dump_table",
    "which distinguishes PyTorch's own kernels from those of other libraries",
    without="every kernel counts as another library's, and fast kernels are in Python",
    otherwise=lambda _name: "",
)
#: How many modes of the dispatcher are active in this thread.
dispatch_modes: Callable[[], int] = take(
    "torch._C._len_torch_dispatch_stack", "which distinguishes code that is traced from code that runs"
)
dispatch_mode: Callable[[Any], Any] = take("torch._C._get_dispatch_mode", "which gives what traces a call")
mode_keys: Any = take("torch._C._TorchDispatchModeKey", "which distinguishes one mode of the dispatcher from another")
without_modes: Any = take("torch.utils._python_dispatch._disable_current_modes", "in which self-tests see real tensors")
without_torch_function: Any = take("torch._C.DisableTorchFunction", "in which self-tests see plain tensors")
is_wrapper: Callable[[Any], bool] = take(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", "which recognizes tensors that wrap others"
)
is_functional: Callable[[Any], bool] = take(
    "torch._is_functional_tensor", "which recognizes tensors that are functionalized"
)
tracing_state: Callable[[], Any] = take(
    "torch._C._get_tracing_state", "which says whether torch.jit.trace writes down calls"
)
set_tracing_state: Callable[[Any], None] = take(
    "torch._C._set_tracing_state", "without which self-tests would be traced"
)
#: Add a number to tensors, or fill them with zeros, by one kernel.
foreach_add: Callable[[Any, Any], None] = take("torch._foreach_add_", "which counts the steps of all layers at once")
foreach_zero: Callable[[Any], None] = take("torch._foreach_zero_", "which empties the caches of all layers at once")
without_autocast: Any = take("torch._C._DisableAutocast", "in which compiled calls are not cast again")
set_grad_enabled: Any = take("torch._C._set_grad_enabled", "which is how Dynamo writes down no_grad")


def dispatch_key(name: str) -> Any:
    """Return the dispatch key of a name, such as ``"CUDA"``."""
    return getattr(_dispatch_keys, name)


# --- torch.func

has_transforms: Callable[[], bool] = take(
    "torch._C._are_functorch_transforms_active", "which says whether a call is transformed"
)
transform_stack: Callable[[], Any] = take(
    "torch._C._functorch.get_interpreter_stack", "which gives the transforms in force"
)
transform_kinds: Any = take("torch._C._functorch.TransformType", "which distinguishes one transform from another")
is_legacy_batched: Callable[[Any], bool] = take(
    "torch._C._functorch.is_legacy_batchedtensor",
    "which recognizes gradients that are computed in a batch",
    without="none counts as such",
    otherwise=lambda _x: False,
)
without_transforms: Any = take(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "in which self-tests are not transformed"
)


def forward_level() -> int:
    """Return how deep forward-mode derivatives nest in this thread; -1: none is active."""
    return int(getattr(_forward_ad, "_current_level", -1))


_forward_ad: Any = importlib.import_module("torch.autograd.forward_ad")
TABLE.append(
    PrivateName(
        "torch.autograd.forward_ad._current_level",
        "which recognizes forward-mode derivatives",
        "none counts as in force",
    )
)

# --- scaled dot product attention

sdp_choice: Callable[..., int] = take("torch._fused_sdp_choice", "which gives the backend that PyTorch would take")
sdp_order: Callable[[], list[int]] = take(
    "torch._C._get_sdp_priority_order",
    "in which backends are tried",
    without="the order counts as PyTorch's default",
    otherwise=lambda: [1, 2, 0, 3, 4],
)
set_sdp_order: Callable[[list[int]], None] = take(
    "torch._C._set_sdp_priority_order",
    "in which backends are tried",
    without="the order stays as it is",
    otherwise=lambda _order: None,
)
#: Whether a backend is enabled, by PyTorch's numbers of them.
sdp_getters: tuple[Callable[[], bool], ...] = (
    take("torch._C._get_math_sdp_enabled", "which is called while the backends are held by a call"),
    take("torch._C._get_flash_sdp_enabled", "as above"),
    take("torch._C._get_mem_efficient_sdp_enabled", "as above"),
    take("torch._C._get_cudnn_sdp_enabled", "as above"),
    take("torch._C._get_overrideable_sdp_enabled", "as above"),
)
sdp_setters: tuple[Callable[[bool], None], ...] = (
    take("torch._C._set_sdp_use_math", "as above"),
    take("torch._C._set_sdp_use_flash", "as above"),
    take("torch._C._set_sdp_use_mem_efficient", "as above"),
    take("torch._C._set_sdp_use_cudnn", "as above"),
    take("torch._C._set_sdp_use_overrideable", "as above"),
)

# --- switches and devices

is_deterministic: Callable[[], bool] = take(
    "torch._C._get_deterministic_algorithms",
    "which costs a tenth of the public function, at each call",
    without="the public function is called",
    otherwise=torch.are_deterministic_algorithms_enabled,
)
fp32_precision: Callable[[str, str], str] = take(
    "torch._C._get_fp32_precision_getter", "which reads a setting without the warnings of the public attribute"
)
set_fp32_precision: Callable[[str, str, str], str] = take(
    "torch._C._set_fp32_precision_setter", "which restores a setting without the warnings of the public attribute"
)
cudnn_allow_tf32: Callable[[], bool] = take(
    "torch._C._get_cudnn_allow_tf32", "which reads a setting without the warnings of the public attribute"
)
mkldnn_enabled: Callable[[], bool] = take(
    "torch._C._get_mkldnn_enabled", "which says whether an LSTM on the CPU is one kernel of oneDNN's"
)
conv_backend: Callable[..., Any] = take(
    "torch._C._select_conv_backend",
    "which gives the memory format of a convolution",
    without="the result is contiguous",
    otherwise=None,
)
conv_memory_format: Callable[..., Any] = take(
    "torch._C._conv_determine_backend_memory_format",
    "which gives the memory format of a convolution",
    without="the result is contiguous",
    otherwise=lambda *_args: torch.contiguous_format,
)
resize_out: Callable[[], Any] = later(
    "torch._prims_common.wrappers._maybe_resize_out",
    "which resizes `out` with PyTorch's own warning",
    without="`out` is resized without it",
    otherwise=lambda out, shape: out.resize_(shape),
)

# --- memory and captured graphs

custom_allocator: Any = take(
    "torch._C._cuda_customAllocator",
    "which takes the functions of an allocator by their addresses",
    without="memory of xpuruntime for CUDA tensors is refused",
    otherwise=None,
)
end_allocating_to_pool: Callable[..., None] = take(
    "torch._C._cuda_endAllocateToPool",
    "which ends a capture that failed",
    without="the failed capture keeps its pool",
    otherwise=lambda *_args: None,
)
release_pool: Callable[..., None] = take(
    "torch._C._cuda_releasePool",
    "which ends a capture that failed",
    without="the failed capture keeps its pool",
    otherwise=lambda *_args: None,
)
has_cuda_context: Callable[[int], bool] = take(
    "torch._C._cuda_hasPrimaryContext",
    "which gives the devices that the profiler waits for",
    without="all devices are waited for",
    otherwise=lambda _index: True,
)

# --- profiler

profiler_enabled: Callable[[], bool] = take(
    "torch._C._autograd._profiler_enabled", "which says whether another profiler runs"
)
disable_profiler: Callable[[], Any] = take("torch._C._autograd._disable_profiler", "which ends a profiler that failed")
prepare_profiler: Callable[[Any], Any] = take(
    "torch.autograd.profiler.profile._prepare_trace", "which a start that was interrupted may have called"
)
enable_profiler: Callable[[Any], Any] = take(
    "torch.autograd.profiler.profile._start_trace", "which lets a profiler that is prepared be ended"
)
ExperimentalConfig: Any = take("torch._C._profiler._ExperimentalConfig", "with which the profiler names overloads")
RecordFunctionFast: Any = take(
    "torch._C._profiler._RecordFunctionFast",
    "which costs a tenth of `torch.profiler.record_function`",
    without="`torch.profiler.record_function` is used",
    otherwise=torch.profiler.record_function,
)

# --- torch.compile and torch.export

compile_context: Any = take("torch._guards.CompileContext", "which recognizes code that is being compiled")
tracing_context: Any = take("torch._guards.TracingContext", "which recognizes code that is being compiled")
compile_wrapper: Any = take(
    "torch._TorchCompileInductorWrapper",
    "through which torch.compile calls Inductor",
    without="what compiled code does past a policy is not reported",
    otherwise=None,
)
dynamo_translator: Callable[[], Any] = later(
    "torch._dynamo.symbolic_convert.InstructionTranslator", "which gives the module whose code Dynamo follows"
)
compiled_graph: Callable[[], Any] = later(
    "torch._functorch.aot_autograd.get_graph_being_compiled", "which distinguishes a forward from a backward"
)
inductor_pass: Callable[[], Any] = later(
    "torch._inductor.custom_graph_pass.CustomGraphPass", "by which calls in compiled code state phase and module"
)
inductor_passes: Callable[[], Any] = later(
    "torch._inductor.custom_graph_pass", "by which calls in compiled code state phase and module"
)
dynamo_config: Callable[[], Any] = later("torch._dynamo.config", "which gives the settings of Dynamo")
inductor_config: Callable[[], Any] = later("torch._inductor.config", "which gives the settings of Inductor")
is_in_state_of_thread: Callable[[str], bool] = take(
    "torch._C._is_key_in_tls", "where Inductor keeps its CUDA graphs, for threads of autograd too"
)
keep_in_state_of_thread: Callable[[str, Any], None] = take(
    "torch._C._stash_obj_in_tls", "where Inductor keeps its CUDA graphs, for threads of autograd too"
)
fake_tensor: Callable[[], Any] = later("torch._subclasses.fake_tensor.FakeTensor", "which stands for traced tensors")
fake_tensor_mode: Callable[[], Any] = later(
    "torch._subclasses.fake_tensor.FakeTensorMode", "in which an exported program is traced again"
)
#: Nested containers as PyTorch takes them apart.
pytree: Any = take("torch.utils._pytree", "which takes arguments apart as torch.compile and torch.export do")

# --- models and devices

dispatch_mode_base: Any = take(
    "torch.utils._python_dispatch.TorchDispatchMode", "by which a run of a program is seen operator by operator"
)
operator_class: Any = take("torch._ops.OpOverload", "which distinguishes operators from functions in a graph")
archive_reader: Any = take(
    "torch._C.PyTorchFileReader", "which opens a .pt2 file once, as torch.export.load does: two readers could see two"
)
#: The handle of a CUDA device's current stream, ten times faster than an object of it.
current_stream: Callable[[int], int] = take(
    "torch._C._cuda_getCurrentRawStream",
    "which costs less than an object of a stream",
    without="an object of the stream is made",
    otherwise=lambda index: torch.cuda.current_stream(index).cuda_stream,
)

# --- the stable C ABI

#: Takes a list of capsules of handles, which it owns from then on. Called in C: the function for one handle takes no
#: ownership in 2.13.
tensors_of_handles: Callable[[list[Any]], list[Any]] = take(
    "torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs",
    "which gives kernels in C the tensors of Python",
    without="no kernel in C is placed",
)
#: Gives a list of capsules of new handles.
handles_of_tensors: Callable[[list[Any]], list[Any]] = take(
    "torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors",
    "which gives kernels in C the tensors of Python",
    without="no kernel in C is placed",
)


def python_kernels(op: Any) -> dict[Any, Any]:
    """Return the kernels in Python of an operator, which PyTorch's tracing looks up first; to be changed in place."""
    kernels: dict[Any, Any] = op.py_kernels
    return kernels


def forget_dispatch(op: Any) -> None:
    """Have an operator look its kernels in Python up anew."""
    op._dispatch_cache.clear()


TABLE.append(PrivateName("torch.ops.aten.mm.default.py_kernels", "which serve code that is traced alone", REFUSES))
TABLE.append(PrivateName("torch.ops.aten.mm.default._dispatch_cache", "which keeps kernels that were found", REFUSES))
