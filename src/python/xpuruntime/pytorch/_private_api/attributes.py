# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Private attributes of PyTorch's objects: tensors, modules, operators, optimizers, functions, the profiler."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from torch.autograd import profiler as _autograd_profiler
from torch.nn.modules import module as _torch_module

from xpuruntime.pytorch._private_api.lookup import TABLE, PrivateName, attribute, later, take

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DYNAMO_GRAPHS",
    "DYNAMO_LIMIT",
    "GRAPH_TREES",
    "TRACED_FUNCTION",
    "TRACED_FUNCTION_MODULES",
    "call_kernel_at",
    "checkpoint_frame",
    "child_modules",
    "code_alone",
    "collective_number",
    "compile_by_inductor",
    "compile_stance",
    "compiled_function",
    "cuda_allocator",
    "default_store",
    "dynamo_disabled",
    "forward_pre_hooks",
    "global_module_hooks",
    "guard_on_attribute",
    "has_hooks",
    "is_replica",
    "is_zero_tensor",
    "mark_constant",
    "mark_dynamic",
    "mute_capturable",
    "nested_sizes",
    "note_step",
    "occupy_stream",
    "operator_name",
    "operator_schema",
    "profiler_flag",
    "remove_library",
    "scaler_states",
    "set_profiler_flag",
    "skip_frames",
    "steps_with_scaler",
    "tensor_version",
    "varlen_uses_cudnn",
    "wrapped_backend",
]

# --- tensors

#: A number that changes when a tensor is written.
tensor_version: Callable[[Any], int] = attribute("torch.Tensor._version", "which tells that a program wrote an input")
#: Whether a tensor is zeros that take no memory.
is_zero_tensor: Callable[[Any], bool] = take(
    "torch.Tensor._is_zerotensor",
    "which recognizes zeros without memory, as forward-mode derivatives have them",
    without="none counts as such",
    otherwise=lambda _x: False,
)
#: The sizes of the parts of a strided nested tensor, which has no shape.
nested_sizes: Callable[[Any], Any] = take(
    "torch.Tensor._nested_tensor_size", "which gives the sizes of the parts of a nested tensor"
)

# --- modules

#: The submodules by all their names, also those that are there twice, which ``named_children`` leaves out.
child_modules: Callable[[Any], dict[str, Any]] = attribute(
    "torch.nn.Module._modules", "which gives a module of several names by each of them"
)
forward_pre_hooks: Callable[[Any], dict[Any, Any]] = attribute(
    "torch.nn.Module._forward_pre_hooks", "which check shapes of an exported program that were checked before",
    without="they are checked twice", otherwise={},
)  # fmt: skip
TABLE += [
    PrivateName(f"torch.nn.Module.{name}", "which says whether an activation has hooks", "its unit is refused")
    for name in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
]
is_replica: Callable[[Any], bool] = attribute(
    "torch.nn.Module._is_replica", "which recognizes the copies of DataParallel",
    without="copies are of no module", otherwise=False,
)  # fmt: skip
#: What keeps the state of one activation checkpoint, or `None`.
checkpoint_frame: Any = take(
    "torch.utils.checkpoint._CheckpointFrame",
    "in which the recomputation of a checkpoint begins",
    without="calls of a recomputation are of the module that runs when the backward reaches it",
    otherwise=None,
)
_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
TABLE += [
    PrivateName(f"torch.nn.modules.module.{name}", "which Dynamo looks at in a strict export", "none counts as placed")
    for name in _HOOKS
]


def has_hooks(module: Any) -> bool:
    """Return whether a module has hooks of its own, or another forward than its class; Dynamo can follow it."""
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    return hooks + len(module._backward_hooks) + len(module._backward_pre_hooks) > 0 or "forward" in module.__dict__


def global_module_hooks() -> list[Any]:
    """Return the hooks that all modules share."""
    return [hook for name in _HOOKS for hook in list(getattr(_torch_module, name, {}).values())]


# --- operators

#: The signature of an operator, `None` of what is none.
operator_schema: Callable[[Any], Any] = attribute(
    "torch.ops.aten.mm.default._schema", "which says what an operator writes and whether its results are views",
    without="every target counts as no operator", otherwise=None,
)  # fmt: skip
#: The name of an operator without its namespace, empty of what is none.
operator_name: Callable[[Any], str] = attribute(
    "torch.ops.aten.mm.default._opname", "which recognizes casts and assertions in an exported graph",
    without="casts stay as they are", otherwise="",
)  # fmt: skip
_kernel_at: Callable[[Any], Any] = attribute(
    "torch.ops.aten.mm.default._op_dk", "which calls the kernel of one dispatch key in code that is traced"
)


def call_kernel_at(op: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the kernel that an operator has at one dispatch key."""
    return _kernel_at(op)(key, *args, **kwargs)


#: Remove the kernels of a `torch.library.Library` now, not when it is collected.
remove_library: Callable[[Any], None] = take(
    "torch.library.Library._destroy", "which removes kernels with the last policy that needs them"
)

# --- optimizers and scalers

TABLE += [
    PrivateName("torch.optim.Optimizer._opt_called", "which schedulers look at", "they warn of their order"),
    PrivateName(
        "torch.optim.Optimizer._warned_capturable_if_run_uncaptured", "which mutes a warning", "PyTorch warns once"
    ),
]


def note_step(optimizer: Any) -> None:
    """Note that an optimizer has stepped inside of a graph, for the warning of learning rate schedulers."""
    optimizer._opt_called = True


def mute_capturable(optimizer: Any) -> None:
    """Have an optimizer say nothing of steps outside of a graph, although it is made for one."""
    optimizer._warned_capturable_if_run_uncaptured = True


#: Whether an optimizer skips a step with infinite gradients by itself.
steps_with_scaler: Callable[[Any], bool] = attribute(
    "torch.optim.Optimizer._step_supports_amp_scaling", "which recognizes fused optimizers, whose steps are captured",
    without="steps with a scaler stay outside of graphs", otherwise=False,
)  # fmt: skip
#: What a scaler keeps of a step that is under way, by optimizer.
scaler_states: Callable[[Any], dict[Any, Any]] = attribute(
    "torch.amp.GradScaler._per_optimizer_states", "which is put back after a step that was broken off",
    without="a step that was broken off leaves the scaler in its middle", otherwise={},
)  # fmt: skip

# --- memory and time of devices

#: The class that ``torch.cuda.memory.change_current_allocator`` takes.
cuda_allocator: Any = take("torch.cuda.memory._CUDAAllocator", "which PyTorch takes as the allocator of a process")
#: Occupy the current CUDA stream for a number of cycles.
occupy_stream: Callable[[int], None] = take(
    "torch.cuda._sleep",
    "behind which launches are queued, so that their times are the device's",
    without="times of the device hold the time of the host where that is the longer one",
    otherwise=lambda _cycles: None,
)

# --- profiler

_set_flag: Callable[[bool], None] = take(
    "torch.autograd.profiler._set_is_profiler_enabled",
    "which ends a profiler that failed",
    without="PyTorch believes that a profiler runs, and refuses the next one",
    otherwise=lambda _on: None,
)
TABLE.append(
    PrivateName(
        "torch.autograd.profiler._is_profiler_enabled",
        "which says whether another profiler is being started",
        "a profiler that is being started is not seen",
    )
)


def profiler_flag() -> bool:
    """Whether PyTorch believes that a profiler runs."""
    return bool(getattr(_autograd_profiler, "_is_profiler_enabled", False))


def set_profiler_flag(on: bool) -> None:
    """Set what `profiler_flag` returns."""
    _set_flag(on)


# --- torch.compile and torch.export

#: The function of Dynamo that says which function of a module is traced, and the modules that have it.
TRACED_FUNCTION = "get_traced_fn"
TRACED_FUNCTION_MODULES = ("torch._dynamo.convert_frame", "torch._dynamo.functional_export")
TABLE += [
    PrivateName(
        f"{name}.{TRACED_FUNCTION}",
        "which has a strict export overlook global hooks of this library",
        "it traces `forward` itself",
    )
    for name in TRACED_FUNCTION_MODULES
]
#: The function that `torch.compile` was given, of the one that it returned; `None` of others.
compiled_function: Callable[[Any], Any] = attribute(
    "torch.compiler.disable._torchdynamo_orig_callable", "which gives the state of a step that is compiled",
    without="what such a step works on has to be passed", otherwise=None,
)  # fmt: skip
#: The name of a backend of `torch.compile` that Dynamo has wrapped; `None` of others.
wrapped_backend: Callable[[Any], str | None] = attribute(
    "torch._dynamo.repro.after_dynamo.WrapBackendDebug._compiler_name", "which recognizes the backends for debugging",
    without="their code counts as compiled into kernels", otherwise=None,
)  # fmt: skip


TABLE += [
    PrivateName(
        "torch._dynamo.eval_frame._stance",
        "which says whether `torch.compile` compiles what is called now",
        "it counts as the default",
    ),
    PrivateName("torch._dynamo.config.disable", "as above", "Dynamo counts as enabled"),
]


def compile_stance() -> tuple[str, Any]:
    """Return the stance of `torch.compile`, and the backend that it forces. Does not import Dynamo."""
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return ("default", None) if stance is None else (stance.stance, getattr(stance, "backend", None))


def dynamo_disabled() -> bool:
    """Whether the program has disabled Dynamo by its settings."""
    return bool(getattr(sys.modules.get("torch._dynamo.config"), "disable", False))


TABLE.append(
    PrivateName(
        "torch._dynamo.maybe_mark_dynamic",
        "which has code compiled for any size of one dimension",
        "each size gets code of its own",
    )
)


def mark_dynamic(x: Any, dim: int) -> None:
    """Have a tensor's size in one dimension be any in what `torch.compile` compiles of it. Imports Dynamo."""
    mark = getattr(importlib.import_module("torch._dynamo"), "maybe_mark_dynamic", None)
    if mark is not None:
        mark(x, dim)


TABLE.append(
    PrivateName("torch._inductor.compile_fx.compile_fx", "which compiles a graph of Dynamo's", "Dynamo asks for it")
)


def compile_by_inductor(graph: Any, examples: Any, keep: Callable[[Any], None]) -> Any:
    """Return the code that Inductor makes of a graph of Dynamo's, as its backend does. Imports Inductor.

    `keep` gets the code inside of it that autograd's part calls: a function of a list, which it empties.
    """
    module = importlib.import_module("torch._inductor.compile_fx")

    def inner(*args: Any, **kwargs: Any) -> Any:
        code = module.compile_fx_inner(*args, **kwargs)
        keep(code)
        return code

    with importlib.import_module("torch._functorch.config").patch(enable_autograd_cache=False):  # which leaves it out
        return module.compile_fx(graph, examples, inner_compile=inner)


def code_alone(code: Any) -> Any:
    """Return what Inductor's code runs after its first call, without what it asks of profilers and caches at each."""
    return getattr(code, "current_callable", None) or code


TABLE.append(
    PrivateName(
        "torch._dynamo.decorators.justknobs_check._dynamo_marked_constant",
        "which `torch.compiler.assume_constant_result` sets, and imports Dynamo for",
        "Dynamo follows the function",
    )
)


def mark_constant(function: Any) -> None:
    """Have Dynamo call a function while it traces, and take its result as a constant."""
    function._dynamo_marked_constant = True


#: The module and the name of Dynamo's class of graphs, and those of the function that compares the number of compiled
#: variants of a code with their limit.
DYNAMO_GRAPHS = ("torch._dynamo.output_graph", "OutputGraph")
DYNAMO_LIMIT = ("torch._dynamo.convert_frame", "exceeds_recompile_limit")
#: The module of Inductor's CUDA graphs, and its names of what each thread has: the graphs by device, and their locks.
GRAPH_TREES = ("torch._inductor.cudagraph_trees", "tree_manager_containers", "tree_manager_locks")
TABLE += [
    PrivateName(
        f"{GRAPH_TREES[0]}.get_obj",
        "by which, before 2.13, one thread alone finds what it has recorded",
        "threads that did not import it refuse to record CUDA graphs of compiled code",
    ),
    PrivateName(
        ".".join(DYNAMO_GRAPHS),
        "by which compiled code is found again under the policy that it was compiled for",
        "each change of the policy drops all compiled code",
    ),
    PrivateName(
        ".".join(DYNAMO_LIMIT),
        "by which code that is compiled for several policies has the limit of variants for each of them",
        "all share one limit",
    ),
]


def guard_on_attribute(graph: Any, module: Any, *names: str) -> None:
    """Have a graph of Dynamo's hold as long as an attribute, reached from a module by names, is what it is now."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource, GlobalSource

    alias = f"__import_{module.__name__.replace('.', '_dot_')}"  # as Dynamo calls modules that guards ask for
    graph.import_sources[alias] = module.__name__
    if graph.package is not None:
        graph.package.add_import_source(alias, module.__name__)
    graph.global_scope[alias] = module
    source: Any = GlobalSource(alias)
    for name in names:
        source = AttrSource(source, name)
    graph.guards.add(source.make_guard(GuardBuilder.CONSTANT_MATCH))


_frames: Any = take(
    "torch._C._dynamo.eval_frame",
    "which has Dynamo leave functions of the dispatcher alone",
    without="Dynamo warns of them",
    otherwise=None,
)


def skip_frames(code: Any, *, within: bool) -> None:
    """Have Dynamo leave the frames of a code alone, and `within` all that they call."""
    if hasattr(_frames, "set_code_exec_strategy"):
        calls = _frames._FrameAction.SKIP if within else _frames._FrameAction.DEFAULT
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(_frames._FrameAction.SKIP, calls))


# --- attention

_VARLEN = "torch.nn.attention.varlen"
TABLE.append(
    PrivateName(
        f"{_VARLEN}._should_use_cudnn", "which says that varlen_attn is given to cuDNN", "it counts as FlashAttention's"
    )
)


def varlen_uses_cudnn(index: int | None) -> bool:
    """Whether PyTorch gives ``varlen_attn`` to cuDNN on a CUDA device; up to 2.13 never."""
    asks = getattr(sys.modules.get(_VARLEN), "_should_use_cudnn", None)
    return asks is not None and bool(asks(index))


#: Gives a function that returns how many collectives of a process group this process has begun.
collective_number: Callable[[Any], Callable[[], int]] = attribute(
    "torch.distributed.ProcessGroup._get_sequence_number_for_group",
    "which tells the rank that others wait for",
    without="ranks are compared by their steps alone",
    otherwise=lambda: 0,
)
#: Gives a function that returns the store of the default process group.
default_store: Callable[[], Callable[[], Any]] = later(
    "torch.distributed.distributed_c10d._get_default_store", "through which ranks agree and watch each other"
)
