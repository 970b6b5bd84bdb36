# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`capture_graph`: a block, or a whole training step, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.nn.parallel import DistributedDataParallel

from xpuruntime.argument_types import COUNT, FLAG, check_types
from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.capture.captured_state import captured_state_of, obstacles, scaler_obstacle
from xpuruntime.pytorch.capture.captured_state import make_capturable as change
from xpuruntime.pytorch.capture.graph_recorder import CudaRecorder
from xpuruntime.pytorch.capture.scoped_capture import GraphBlock
from xpuruntime.pytorch.capture.step import CapturedStep, R
from xpuruntime.pytorch.capture.step_program import StepProgram

if TYPE_CHECKING:
    from xpuruntime.pytorch.capture.captured_state import CapturedState

_BLOCK_WARMUP = 3
#: Steps before a capture, and with a DistributedDataParallel, which waits for events in its first ten.
_WARMUP, _DDP_WARMUP = 3, 11
#: Modes of torch.compile that capture CUDA graphs.
_CAPTURING_MODES = ("reduce-overhead", "max-autotune")


@overload
def capture_graph(
    fn: None = None, *, warmup_iters: int = ..., pool: Any = None, strict: bool = False
) -> GraphBlock: ...
@overload
def capture_graph(
    fn: Callable[..., R],
    sample_inputs: Any = None,
    *,
    optimizer: Any = None,
    scaler: Any = None,
    before_step: Callable[[], Any] | None = None,
    modules: Sequence[Any] | None = None,
    warmup: int | None = None,
    pool: Any = None,
    max_graphs: int = 8,
    strict: bool = False,
    clone_outputs: bool = False,
    capture_optimizer: bool = True,
    make_capturable: bool = False,
    compile: bool | Mapping[str, Any] = False,
) -> CapturedStep[R]: ...


def capture_graph(
    fn: Callable[..., Any] | None = None,
    sample_inputs: Any = None,
    *,
    optimizer: Any = None,
    scaler: Any = None,
    before_step: Callable[[], Any] | None = None,
    modules: Sequence[Any] | None = None,
    warmup: int | None = None,
    pool: Any = None,
    max_graphs: int = 8,
    strict: bool = False,
    clone_outputs: bool = False,
    capture_optimizer: bool = True,
    make_capturable: bool = False,
    compile: bool | Mapping[str, Any] = False,
    warmup_iters: int = _BLOCK_WARMUP,
) -> GraphBlock | CapturedStep[Any]:
    """Capture a whole training step, or a ``with`` block, into a CUDA graph, so that the host launches it at once.

    ``step = capture_graph(fn, sample_inputs, optimizer=optimizer)`` returns a step; ``step(*batch)`` does what
    ``fn(*batch)``, backward and the optimizer would do, by one launch. A graph belongs to shapes, types and strides of
    the inputs, train or eval mode of every module, autocasting, grad mode, the active policy and the numbers of the
    optimizer. Another combination is captured when it first comes; the least recently used of `max_graphs` gives way.

    ``with capture_graph() as graph:`` captures the block, after a warm-up by hand; ``graph.replay()`` runs it.

    Parameters
    ----------
    fn : callable, optional
        With `optimizer`: computes the loss, one number in a tensor, and returns it, or a tuple that begins with it. A
        call of the step then takes the gradients away, runs `fn`, ``loss.backward()`` (of the loss that `scaler` has
        scaled), `before_step`, ``optimizer.step()`` and ``scaler.update()``. Without `optimizer`: `fn` is captured as
        it is; it may do all that itself, several backward passes before one step included, which is how gradients are
        accumulated. Either way gradients are new at each call. Left out: see `GraphBlock`.
    sample_inputs : tuple, list or any, optional
        A tuple or list of the arguments of one call; anything else is the only argument. They are used up in the
        warm-up, which trains nothing. Left out: the first call captures.
    optimizer : torch.optim.Optimizer, optional
        Constructed with ``capturable=True`` (SGD: ``fused=True``) and ``lr`` as a tensor on the device. Schedulers of
        PyTorch write into that tensor; ``group["lr"] = 0.1`` would not, ``group["lr"].fill_(0.1)`` does.
    scaler : torch.amp.GradScaler, optional
        With a fused optimizer all of it is captured; with another, its step runs after each replay.
    before_step : callable, optional
        Runs before each step of `optimizer`, captured: ``lambda: clip_grad_norm_(model.parameters(), 1.0)``.
    modules : torch.nn.Module or sequence of them, optional
        What `fn` works on. Default: what it closes over, names or is bound to.
    warmup : int, optional
        How often the step runs before it is captured, on the stream of the capture. Default: 3 times, and 11 with a
        DistributedDataParallel, which waits for the device in its first ten steps. Parameters, buffers, state of
        optimizer and scaler, and random numbers are given back afterwards; for that time the host has copies of them.
    pool : handle, torch.cuda.MemPool, torch.cuda.CUDAGraph, optional
        Memory to share with graphs that never run at the same time. Default: one pool for all graphs of this step.
    max_graphs : int
    strict : bool
        Whether it is an error when something would run eagerly.
    clone_outputs : bool
        Return copies. Otherwise the outputs of a call are overwritten by the next one for the same inputs.
    capture_optimizer : bool
        ``False``: forward and backward are captured, and the optimizer steps after each replay.
    make_capturable : bool
        Consent to change `optimizer` where its step could not be captured: ``capturable`` (SGD: ``fused``), ``lr``
        as a float32 tensor, state moved to the device.
    compile : bool or mapping
        Have ``torch.compile`` compile `fn` first, with these options: its kernels are captured. Not with a mode that
        captures by itself, such as ``"reduce-overhead"``.
    warmup_iters : int
        Another name of `warmup` for a step. A block, which may also be written ``capture_graph(warmup_iters, pool)``,
        runs once, so only the default is taken.

    Returns
    -------
    CapturedStep or GraphBlock
        `CapturedStep.report` says what is captured, what is not, and why.

    Raises
    ------
    InputError
        The optimizer is not capturable; arguments contradict each other; modules could not be found. Each with a fix.
    UnsupportedOperationError
        With ``strict=True``, something would run eagerly; or a block cannot be captured on a CUDA device.

    Warns
    -----
    XpuRuntimeWarning
        Once, when something runs eagerly: there is no CUDA device, parameters are on several, or the capture failed.

    Notes
    -----
    Inputs are copied into buffers on the device that `fn` sees, without waiting where they lie in pinned memory or on
    the device; a pinned batch must not be overwritten before the copy is done. They are left where they are when
    parameters are on several devices. Values other than tensors are frozen into the graph, as is everything that `fn`
    computes on the host. Switches of ``torch.backends`` are looked at only while capturing; call `CapturedStep.reset`
    after changing one, and after replacing parameters or modules by others.
    A function that ``torch.compile`` made can be inside; not one with ``mode="reduce-overhead"``, which captures by
    itself.

    Examples
    --------
    >>> import torch, xpuruntime.pytorch as xrt_torch
    >>> model = torch.nn.Linear(4, 1).cuda()  # doctest: +SKIP
    >>> lr = torch.tensor(1e-3, device="cuda")  # doctest: +SKIP
    >>> adam = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)  # doctest: +SKIP
    >>> step = xrt_torch.capture_graph(lambda x, y: (model(x) - y).square().mean(), optimizer=adam)  # doctest: +SKIP
    >>> for x, y in batches:  # doctest: +SKIP
    ...     loss = step(x, y)
    """
    if fn is None or isinstance(fn, int):
        warmups = warmup_iters
        if fn is not None:  # the order of a block: capture_graph(warmup_iters, pool)
            warmups, sample_inputs, pool = fn, None, sample_inputs if pool is None else pool
        return _block(warmups, pool, strict, others=(sample_inputs, optimizer, scaler, before_step, modules))
    if not callable(fn):
        msg = f"capture_graph: fn is a {type(fn).__name__}, which cannot be called. Fix: pass a function, or nothing"
        raise InputError(msg)
    check_types(
        {"warmup": COUNT, "max_graphs": COUNT, "warmup_iters": COUNT},
        {"warmup": warmup, "max_graphs": max_graphs, "warmup_iters": warmup_iters},
        optional=["warmup"],
    )
    flags = {
        "strict": strict, "clone_outputs": clone_outputs, "capture_optimizer": capture_optimizer,
        "make_capturable": make_capturable,
    }  # fmt: skip
    check_types(dict.fromkeys(flags, FLAG), flags)
    if not isinstance(compile, (bool, Mapping)):
        raise TypeError(f"compile is True, False or a mapping of options of torch.compile, got {compile!r:.60}")
    if warmup_iters != _BLOCK_WARMUP:
        if warmup not in (None, warmup_iters):
            raise InputError(
                f"capture_graph: warmup={warmup} and warmup_iters={warmup_iters} contradict each other. "
                "Fix: leave one out"
            )
        warmup = warmup_iters
    _check(optimizer, scaler, before_step, warmup, max_graphs, capture_optimizer, make_capturable)
    used = state_of(fn, optimizer, scaler, modules)
    samples = samples_of(sample_inputs)
    device, why_eager = device_of(used, samples)
    if why_eager and strict:
        msg = (
            f"capture_graph: {why_eager}, and strict=True asks for a graph. "
            "Fix: leave it out to have the step run eagerly"
        )
        raise UnsupportedOperationError(msg)
    work = StepProgram(compiled_by(fn, compile), optimizer, scaler, before_step, used.parameters())
    reasons, notes = [], _notes(used)
    if optimizer is not None and not why_eager:
        reasons = _settle(work, device, capture_optimizer=capture_optimizer, make_capturable=make_capturable)
        if reasons and strict and capture_optimizer:
            msg = f"capture_graph: {reasons[0]}; or pass capture_optimizer=False to have it run after each replay"
            raise UnsupportedOperationError(msg)
        if not capture_optimizer:
            notes.append("the optimizer steps after each replay, as capture_optimizer=False asks")
    step: CapturedStep[Any] = CapturedStep(
        work,
        used,
        device,
        None if why_eager else CudaRecorder(device, pool),
        warmup=_warmup(used) if warmup is None else warmup,
        max_graphs=max_graphs,
        strict=strict,
        clone_outputs=clone_outputs,
        why_eager=why_eager,
        reasons=reasons,
        notes=notes,
    )
    if sample_inputs is not None:
        step.prepare(*samples)
    return step


def _block(warmup_iters: int, pool: Any, strict: bool, others: tuple[Any, ...]) -> GraphBlock:
    if any(value is not None for value in others):
        msg = "capture_graph: without fn a with block is captured, which takes no inputs and no optimizer. Fix: pass fn"
        raise InputError(msg)
    check_types({"warmup_iters": COUNT, "strict": FLAG}, {"warmup_iters": warmup_iters, "strict": strict})
    if warmup_iters != _BLOCK_WARMUP:
        msg = (
            f"capture_graph: warmup_iters={warmup_iters} means nothing for a block, which runs once, and captured; run "
            f"its work {warmup_iters} times before, or use step = capture_graph(fn, inputs, warmup={warmup_iters})"
        )
        raise InputError(msg)
    return GraphBlock(pool, strict=strict)


def _check(
    optimizer: Any,
    scaler: Any,
    before_step: Any,
    warmup: int | None,
    max_graphs: int,
    capture_optimizer: bool,
    make_capturable: bool,
) -> None:
    problem = ""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        problem = f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer"
    elif scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        problem = f"scaler is a {type(scaler).__name__}, not a torch.amp.GradScaler"
    elif isinstance(optimizer, torch.optim.LBFGS):
        problem = "LBFGS computes the loss several times in a step; do the whole step in fn, and leave optimizer= out"
    elif before_step is not None and not callable(before_step):
        problem = f"before_step is a {type(before_step).__name__}, not a function"
    elif optimizer is None and (scaler is not None or before_step is not None or make_capturable):
        name = "scaler" if scaler is not None else "before_step" if before_step is not None else "make_capturable"
        problem = f"{name} needs optimizer=; without it, fn does the whole step itself"
    elif make_capturable and not capture_optimizer:
        problem = "make_capturable=True and capture_optimizer=False contradict each other; leave one of them out"
    elif warmup is not None and warmup < 1:
        problem = f"warmup={warmup} would capture work that runs for the first time, which cannot be; 3 do"
    elif max_graphs < 1:
        problem = f"max_graphs={max_graphs} keeps no graph; pass 1 or more"
    if problem:
        raise InputError(f"capture_graph: {problem}")


def _warmup(used: CapturedState) -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and any(isinstance(module, DistributedDataParallel) for module in used.all_modules()):
        return _DDP_WARMUP
    return _WARMUP


def compiled_by(fn: Callable[..., Any], compile: bool | Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function as ``torch.compile`` compiles it with such options; ``False``: as it is."""
    if compile is False:
        return fn
    options = {} if compile is True else dict(compile)
    if options.get("mode") in _CAPTURING_MODES:
        msg = (
            f"compile has the mode {options['mode']!r}, in which torch.compile captures CUDA graphs by "
            "itself. Fix: leave mode out, or use max-autotune-no-cudagraphs"
        )
        raise InputError(msg)
    try:
        compiled: Callable[..., Any] = torch.compile(fn, **options)
    except TypeError as error:
        raise InputError(f"compile is not what torch.compile takes: {error}") from None
    return compiled


def _settle(work: StepProgram, device: torch.device, *, capture_optimizer: bool, make_capturable: bool) -> list[str]:
    """Decide whether the optimizer steps inside of the graph. Returns why it does not, unless that was asked for."""
    optimizer = work.optimizer
    if not capture_optimizer:
        work.steps_inside = False
        return []
    if make_capturable:
        change(optimizer, device)
    reasons = obstacles(optimizer, device)
    if reasons:
        raise InputError(f"capture_graph: {'; '.join(reasons)}")
    # It warns of steps outside of a capture, which the warm-up has.
    _private_api.mute_capturable(optimizer)
    why = scaler_obstacle(optimizer, work.scaler)
    work.steps_inside = not why
    return [why] if why else []


def _notes(used: CapturedState) -> list[str]:
    if used.modules:
        return []
    return [
        "no torch.nn.Module was found in fn, so nothing but its optimizers is given back after the warm-up; "
        "if it works on one, pass modules=[model]"
    ]


_CPU = torch.device("cpu")


def state_of(fn: Callable[..., Any], optimizer: Any, scaler: Any, modules: Sequence[Any] | None) -> CapturedState:
    """Return what a step works on. Raises InputError where modules of the optimizer's parameters cannot be found."""
    if not callable(fn):
        raise InputError(
            f"capture_graph: fn is a {type(fn).__name__}. Fix: pass the function that computes the loss or the step"
        )
    if isinstance(modules, torch.nn.Module):
        modules = (modules,)
    if modules is not None and not isinstance(modules, Iterable):
        raise InputError(
            f"capture_graph: modules is a {type(modules).__name__}. Fix: pass a list, such as modules=[model]"
        )
    used = captured_state_of(fn)
    for value in (*(() if modules is None else modules), optimizer, scaler):
        if value is not None and not used.add(value):
            msg = (
                f"capture_graph: modules holds a {type(value).__name__}. "
                "Fix: pass torch.nn.Modules, such as modules=[model]"
            )
            raise InputError(msg)
    missing = used.unexplained()
    if missing and modules is None:
        msg = (
            f"capture_graph: {missing} parameters of the optimizer belong to no module that fn closes over, names or "
            f"is bound to, so train or eval mode and buffers of their modules are not known. Fix: pass modules=[model]"
        )
        raise InputError(msg)
    return used


def samples_of(sample_inputs: Any) -> tuple[Any, ...]:
    """Return sample inputs as the arguments of a call."""
    if sample_inputs is None:
        return ()
    return tuple(sample_inputs) if isinstance(sample_inputs, (tuple, list)) else (sample_inputs,)


def device_of(used: CapturedState, samples: tuple[Any, ...]) -> tuple[torch.device, str]:
    """Return where the step runs, and why it runs eagerly there, or nothing."""
    tensors = used.tensors() or [leaf for leaf in samples if isinstance(leaf, torch.Tensor)]
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if not devices:
        devices = [torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU]
    if len(devices) > 1:
        names = " and ".join(map(str, devices))
        return devices[0], f"parameters and buffers are on {names}, and a graph belongs to one device"
    device = devices[0]
    if device.type == "cuda":
        return device, ""
    if torch.cuda.is_available():
        return device, f"parameters are on {device}, which has no CUDA graphs; move the model to a CUDA device"
    return device, f"the {device.type.upper()} has no CUDA graphs"
