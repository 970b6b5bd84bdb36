# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Private API of PyTorch: every name that it does not promise to keep, why it is used, and what is done without it.

Nothing else in the package uses such a name. Each is taken when this module is imported, or on first use where its
module takes seconds to import. `missing` lists those that the installed PyTorch lacks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["TABLE", "PrivateName", "missing"]


class PrivateName(NamedTuple):
    """One name of PyTorch's that is private.

    Attributes
    ----------
    path : str
        From its module on: ``"torch._C._current_graph_task_id"``.
    why : str
        What no public name gives.
    without : str
        What is done on a PyTorch that lacks it.
    """

    path: str
    why: str
    without: str


#: All of them, in the order of this file.
TABLE: list[PrivateName] = []

_NONE = object()
_REFUSES = "what needs it is refused"


def missing() -> list[PrivateName]:
    """Return those that the installed PyTorch lacks. Imports all their modules, which takes seconds."""
    return [one for one in TABLE if _find(one.path) is _NONE]


def _find(path: str, *, loaded_only: bool = False) -> Any:
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        if loaded_only and name not in sys.modules:
            continue
        try:
            found: Any = sys.modules.get(name) or importlib.import_module(name)
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, _NONE)
            if found is _NONE:
                break
        if found is not _NONE:
            return found
    return _NONE


def _take(path: str, why: str, *, without: str = _REFUSES, otherwise: Any = _NONE) -> Any:
    """Return what has this name; `otherwise` where it is missing, or a function that refuses."""
    TABLE.append(PrivateName(path, why, without))
    found = _find(path)
    if found is not _NONE:
        return found
    return _refusing(path, why) if otherwise is _NONE else otherwise


def _later(path: str, why: str, *, without: str = _REFUSES, otherwise: Any = _NONE) -> Callable[[], Any]:
    """Return a function that returns what has this name, whose module is imported by its first call."""
    TABLE.append(PrivateName(path, why, without))

    @functools.cache
    def get() -> Any:
        found = _find(path)
        if found is not _NONE:
            return found
        return _refusing(path, why) if otherwise is _NONE else otherwise

    return get


def _refusing(path: str, why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        msg = f"this PyTorch {torch.__version__} has no {path}, {why}. Fix: install a release that xpuruntime supports"
        raise UnsupportedOperationError(msg, engine="torch")

    return refuse


# --- autograd

#: The number of the backward that runs in this thread, or -1.
running_backward: Callable[[], int] = _take(
    "torch._C._current_graph_task_id",
    "which tells the phase of a call in a backward",
    without="every call that records no gradient is of the phase `infer`",
    otherwise=lambda: -1,
)
#: The sequence number of the next node of autograd in this thread.
next_node: Callable[[], int] = _take(
    "torch.autograd._get_sequence_nr",
    "which tells the module of a node of autograd",
    without="calls of a backward are of no module",
    otherwise=lambda: 0,
)
_running_node: Callable[[], Any] = _take(
    "torch._C._current_autograd_node",
    "which tells the module of a call in a backward",
    without="calls of a backward are of no module",
    otherwise=lambda: None,
)
#: The attribute in which a node of a `torch.autograd.Function` has the number of its thread.
NODE_THREAD = "xpuruntime_thread"


def running_node() -> tuple[int, int | None] | None:
    """Return the sequence number of the node of autograd that runs in this thread, and its thread where it is noted."""
    node = _running_node()
    if node is None:
        return None
    return node._sequence_nr(), getattr(node, NODE_THREAD, None)


#: The base of `torch.autograd.Function` without its checks for ``torch.func``.
SingleLevelFunction: Any = _take(
    "torch.autograd.function._SingleLevelFunction",
    "through which every autograd.Function passes",
    without="`torch.autograd.Function` stands for it",
    otherwise=torch.autograd.Function,
)
#: A context in which such a function may be applied inside of ``torch.func``.
single_level_functions: Any = _take(
    "torch._functorch.utils.enable_single_level_autograd_function",
    "without which attention has no gradient inside of torch.func",
    without="such gradients are refused by PyTorch",
    otherwise=contextlib.nullcontext,
)
any_requires_grad: Callable[..., bool] = _take(
    "torch._C._any_requires_grad",
    "which looks at tensors in lists as well",
    without="every tensor is asked",
    otherwise=lambda *args: any(isinstance(x, torch.Tensor) and x.requires_grad for x in args),
)

# --- the dispatcher

dispatch_keyset: Any = _take("torch._C.DispatchKeySet", "with which kernels are called")
_dispatch_keys: Any = _take("torch._C.DispatchKey", "by which kernels are placed")
keyset_after_autograd: Any = _take("torch._C._after_autograd_keyset", "with which an operator goes on below autograd")
below_autograd: Any = _take("torch._C._AutoDispatchBelowAutograd", "in which an operator goes on below autograd")
without_keys: Any = _take("torch._C._ExcludeDispatchKeyGuard", "in which autocast leaves an operator alone")
with_keys: Any = _take("torch._C._ForceDispatchKeyGuard", "in which kernels for devices see what autograd sees")
excluded_keys: Callable[[], Any] = _take("torch._C._dispatch_tls_local_exclude_set", "which kernels for devices need")
included_keys: Callable[[], Any] = _take("torch._C._dispatch_tls_local_include_set", "which kernels for devices need")
has_kernel: Callable[[str, str], bool] = _take(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "which tells composite operators from others"
)
dispatch_table: Callable[[str], str] = _take(
    "torch._C._dispatch_dump_table",
    "which tells PyTorch's own kernels from those of other libraries",
    without="every kernel counts as another library's, and fast kernels are in Python",
    otherwise=lambda _name: "",
)
#: How many modes of the dispatcher are active in this thread.
dispatch_modes: Callable[[], int] = _take(
    "torch._C._len_torch_dispatch_stack", "which tells code that is traced from code that runs"
)
dispatch_mode: Callable[[Any], Any] = _take("torch._C._get_dispatch_mode", "which tells what traces a call")
mode_keys: Any = _take("torch._C._TorchDispatchModeKey", "which tells one mode of the dispatcher from another")
without_modes: Any = _take(
    "torch.utils._python_dispatch._disable_current_modes", "in which self-tests see real tensors"
)
without_torch_function: Any = _take("torch._C.DisableTorchFunction", "in which self-tests see plain tensors")
is_wrapper: Callable[[Any], bool] = _take(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", "which tells tensors that wrap others"
)
is_functional: Callable[[Any], bool] = _take(
    "torch._is_functional_tensor", "which tells tensors that are functionalized"
)
tracing_state: Callable[[], Any] = _take(
    "torch._C._get_tracing_state", "which tells whether torch.jit.trace writes down calls"
)
set_tracing_state: Callable[[Any], None] = _take(
    "torch._C._set_tracing_state", "without which self-tests would be traced"
)
without_autocast: Any = _take("torch._C._DisableAutocast", "in which compiled calls are not cast again")
set_grad_enabled: Any = _take("torch._C._set_grad_enabled", "which is how Dynamo writes down no_grad")


def dispatch_key(name: str) -> Any:
    """Return the dispatch key of a name, such as ``"CUDA"``."""
    return getattr(_dispatch_keys, name)


# --- torch.func

has_transforms: Callable[[], bool] = _take(
    "torch._C._are_functorch_transforms_active", "which tells whether a call is transformed"
)
transform_stack: Callable[[], Any] = _take(
    "torch._C._functorch.get_interpreter_stack", "which tells the transforms in force"
)
transform_kinds: Any = _take("torch._C._functorch.TransformType", "which tells one transform from another")
is_legacy_batched: Callable[[Any], bool] = _take(
    "torch._C._functorch.is_legacy_batchedtensor",
    "which tells gradients that are computed in a batch",
    without="none counts as such",
    otherwise=lambda _x: False,
)
without_transforms: Any = _take(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "in which self-tests are not transformed"
)


def forward_level() -> int:
    """Return how deep forward-mode derivatives nest in this thread; -1: none is active."""
    return int(getattr(_forward_ad, "_current_level", -1))


_forward_ad: Any = importlib.import_module("torch.autograd.forward_ad")
TABLE.append(
    PrivateName(
        "torch.autograd.forward_ad._current_level", "which tells forward-mode derivatives", "none counts as in force"
    )
)

# --- scaled dot product attention

sdp_choice: Callable[..., int] = _take("torch._fused_sdp_choice", "which tells the backend that PyTorch would take")
sdp_order: Callable[[], list[int]] = _take(
    "torch._C._get_sdp_priority_order",
    "in which backends are tried",
    without="the order counts as PyTorch's default",
    otherwise=lambda: [1, 2, 0, 3, 4],
)
set_sdp_order: Callable[[list[int]], None] = _take(
    "torch._C._set_sdp_priority_order",
    "in which backends are tried",
    without="the order stays as it is",
    otherwise=lambda _order: None,
)
#: Whether a backend is enabled, by PyTorch's numbers of them.
sdp_getters: tuple[Callable[[], bool], ...] = (
    _take("torch._C._get_math_sdp_enabled", "which is called while the backends are held by a call"),
    _take("torch._C._get_flash_sdp_enabled", "as above"),
    _take("torch._C._get_mem_efficient_sdp_enabled", "as above"),
    _take("torch._C._get_cudnn_sdp_enabled", "as above"),
    _take("torch._C._get_overrideable_sdp_enabled", "as above"),
)
sdp_setters: tuple[Callable[[bool], None], ...] = (
    _take("torch._C._set_sdp_use_math", "as above"),
    _take("torch._C._set_sdp_use_flash", "as above"),
    _take("torch._C._set_sdp_use_mem_efficient", "as above"),
    _take("torch._C._set_sdp_use_cudnn", "as above"),
    _take("torch._C._set_sdp_use_overrideable", "as above"),
)

# --- switches and devices

is_deterministic: Callable[[], bool] = _take(
    "torch._C._get_deterministic_algorithms",
    "which costs a tenth of the public function, at each call",
    without="the public function is called",
    otherwise=torch.are_deterministic_algorithms_enabled,
)
fp32_precision: Callable[[str, str], str] = _take(
    "torch._C._get_fp32_precision_getter", "which reads a setting without the warnings of the public attribute"
)
set_fp32_precision: Callable[[str, str, str], str] = _take(
    "torch._C._set_fp32_precision_setter", "which restores a setting without the warnings of the public attribute"
)
cudnn_allow_tf32: Callable[[], bool] = _take(
    "torch._C._get_cudnn_allow_tf32", "which reads a setting without the warnings of the public attribute"
)
mkldnn_enabled: Callable[[], bool] = _take(
    "torch._C._get_mkldnn_enabled", "which tells whether an LSTM on the CPU is one kernel of oneDNN's"
)
conv_backend: Callable[..., Any] = _take(
    "torch._C._select_conv_backend",
    "which tells the memory format of a convolution",
    without="the result is contiguous",
    otherwise=None,
)
conv_memory_format: Callable[..., Any] = _take(
    "torch._C._conv_determine_backend_memory_format",
    "which tells the memory format of a convolution",
    without="the result is contiguous",
    otherwise=lambda *_args: torch.contiguous_format,
)
resize_out: Callable[[], Any] = _later(
    "torch._prims_common.wrappers._maybe_resize_out",
    "which resizes `out` with PyTorch's own warning",
    without="`out` is resized without it",
    otherwise=lambda out, shape: out.resize_(shape),
)

# --- memory and captured graphs

custom_allocator: Any = _take(
    "torch._C._cuda_customAllocator",
    "which takes the functions of an allocator by their addresses",
    without="memory of xpuruntime for CUDA tensors is refused",
    otherwise=None,
)
end_allocating_to_pool: Callable[..., None] = _take(
    "torch._C._cuda_endAllocateToPool",
    "which ends a capture that failed",
    without="the failed capture keeps its pool",
    otherwise=lambda *_args: None,
)
release_pool: Callable[..., None] = _take(
    "torch._C._cuda_releasePool",
    "which ends a capture that failed",
    without="the failed capture keeps its pool",
    otherwise=lambda *_args: None,
)
has_cuda_context: Callable[[int], bool] = _take(
    "torch._C._cuda_hasPrimaryContext",
    "which tells the devices that the profiler waits for",
    without="all devices are waited for",
    otherwise=lambda _index: True,
)

# --- profiler

profiler_enabled: Callable[[], bool] = _take(
    "torch._C._autograd._profiler_enabled", "which tells whether another profiler runs"
)
disable_profiler: Callable[[], Any] = _take("torch._C._autograd._disable_profiler", "which ends a profiler that failed")
prepare_profiler: Callable[[Any], Any] = _take(
    "torch.autograd.profiler.profile._prepare_trace", "which a start that was interrupted may have called"
)
enable_profiler: Callable[[Any], Any] = _take(
    "torch.autograd.profiler.profile._start_trace", "which lets a profiler that is prepared be ended"
)
ExperimentalConfig: Any = _take("torch._C._profiler._ExperimentalConfig", "with which the profiler names overloads")
RecordFunctionFast: Any = _take(
    "torch._C._profiler._RecordFunctionFast",
    "which costs a tenth of `torch.profiler.record_function`",
    without="`torch.profiler.record_function` is used",
    otherwise=torch.profiler.record_function,
)

# --- torch.compile and torch.export

compile_context: Any = _take("torch._guards.CompileContext", "which tells code that is being compiled")
tracing_context: Any = _take("torch._guards.TracingContext", "which tells code that is being compiled")
compile_wrapper: Any = _take(
    "torch._TorchCompileInductorWrapper",
    "through which torch.compile calls Inductor",
    without="what compiled code does past a policy is not reported",
    otherwise=None,
)
dynamo_frames: Any = _take(
    "torch._C._dynamo.eval_frame",
    "which has Dynamo leave functions of the dispatcher alone",
    without="Dynamo warns of them",
    otherwise=None,
)
dynamo_translator: Callable[[], Any] = _later(
    "torch._dynamo.symbolic_convert.InstructionTranslator", "which tells the module whose code Dynamo follows"
)
compiled_graph: Callable[[], Any] = _later(
    "torch._functorch.aot_autograd.get_graph_being_compiled", "which tells a forward from a backward"
)
inductor_pass: Callable[[], Any] = _later(
    "torch._inductor.custom_graph_pass.CustomGraphPass", "by which calls in compiled code state phase and module"
)
inductor_passes: Callable[[], Any] = _later(
    "torch._inductor.custom_graph_pass", "by which calls in compiled code state phase and module"
)
inductor_config: Callable[[], Any] = _later("torch._inductor.config", "which tells the settings of Inductor")
graph_trees: Callable[[], Any] = _later(
    "torch._inductor.cudagraph_trees.reset_cudagraph_trees",
    "whose state belongs, in PyTorch 2.11, to the thread that imports it",
    without="nothing has to be imported",
    otherwise=None,
)
fake_tensor: Callable[[], Any] = _later("torch._subclasses.fake_tensor.FakeTensor", "which stands for traced tensors")
fake_tensor_mode: Callable[[], Any] = _later(
    "torch._subclasses.fake_tensor.FakeTensorMode", "in which an exported program is traced again"
)
#: Nested containers as PyTorch takes them apart.
pytree: Any = _take("torch.utils._pytree", "which takes arguments apart as torch.compile and torch.export do")

# --- the stable C ABI

# Of one tensor, PyTorch's functions for lists alone: that for one takes no ownership of the handle in 2.13.
_tensors_of_handles: Callable[[list[Any]], list[Any]] = _take(
    "torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs",
    "which gives kernels in C the tensors of Python",
    without="no kernel in C is placed",
)
_handles_of_tensors: Callable[[list[Any]], list[Any]] = _take(
    "torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors",
    "which gives kernels in C the tensors of Python",
    without="no kernel in C is placed",
)


def tensor_of_handle(handle: Any) -> Any:
    """Return the tensor of a capsule of a handle, which it owns from then on."""
    return _tensors_of_handles([handle])[0]


def handle_of_tensor(tensor: Any) -> Any:
    """Return a capsule of a new handle of a tensor."""
    return _handles_of_tensors([tensor])[0]


def python_kernels(op: Any) -> dict[Any, Any]:
    """Return the kernels in Python of an operator, which PyTorch's tracing looks up first; to be changed in place."""
    found: dict[Any, Any] = op.py_kernels
    return found


def forget_dispatch(op: Any) -> None:
    """Have an operator look its kernels in Python up anew."""
    op._dispatch_cache.clear()


TABLE.append(PrivateName("torch.ops.aten.mm.default.py_kernels", "which serve code that is traced alone", _REFUSES))
TABLE.append(PrivateName("torch.ops.aten.mm.default._dispatch_cache", "which keeps kernels that were found", _REFUSES))


def note_step(optimizer: Any) -> None:
    """Note that an optimizer has stepped inside of a graph, for the warning of learning rate schedulers."""
    optimizer._opt_called = True


def mute_capturable(optimizer: Any) -> None:
    """Have an optimizer say nothing of steps outside of a graph, although it is made for one."""
    optimizer._warned_capturable_if_run_uncaptured = True


TABLE.append(PrivateName("torch.optim.Optimizer._opt_called", "which schedulers look at", "they warn of their order"))
TABLE.append(
    PrivateName(
        "torch.optim.Optimizer._warned_capturable_if_run_uncaptured", "which mutes a warning", "PyTorch warns once"
    )
)


def reset_fully_sharded(modules: Iterable[Any]) -> None:
    """Let modules of ``fully_shard`` begin anew after a step that was broken off: parameters are sharded again.

    PyTorch's own ``reset_iter_state``, of 2.13, waits for events of the failed step, which those of a capture refuse.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in modules:
        if isinstance(module, fsdp.FSDPModule) and hasattr(module, "_get_fsdp_state"):
            _reset_fsdp_state(module._get_fsdp_state())


def _reset_fsdp_state(state: Any) -> None:
    idle = type(state._training_state).IDLE
    for shared, names in (
        (state._comm_ctx, ("all_gather_state", "reduce_scatter_state")),
        (state._state_ctx, ("iter_forward_root", "post_optim_event")),
    ):
        for name in names:
            if hasattr(shared, name):
                setattr(shared, name, None)
    for name in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
        getattr(state._comm_ctx, name, []).clear()
    state._state_ctx.post_backward_final_callback_queued = False
    state._modules_to_run_forward.clear()
    state._training_state = idle
    for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
        for name in ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event"):
            if hasattr(group, name):
                setattr(group, name, None)
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = idle
        group._to_sharded()


_HALF_WAY = "modules stay as a step that was broken off left them"
TABLE.append(PrivateName("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "state to reset", _HALF_WAY))
TABLE.append(
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded",
        "which gives the memory of whole parameters back",
        _HALF_WAY,
    )
)
