# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Canary: before the first use of a kernel of another package, its forward and backward against float64.

The inputs are those on which kernels of vendors were wrong: lengths around blocks, rows of zeros, large and small
numbers, scores far below zero, one key that outweighs all others, views that are not dense, several sizes in turn. What
a kernel writes into its inputs or into the gradient that it gets is found as well. The verdict is kept with measured
times, for the same packages, variables, device and driver.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import XpuRuntimeError, warn
from xpuruntime.evidence.tolerances import KERNEL_TOLERANCES
from xpuruntime.measuring.rounds import KernelTiming, Replacement
from xpuruntime.measuring.tuning_watch import TuningStep
from xpuruntime.ops import tuned_records
from xpuruntime.ops.plugins import facts_of_kernel
from xpuruntime.ops.torch_kernels import CANARY_VARIABLE, Saved, canary_facts
from xpuruntime.policies import TuningPolicy
from xpuruntime.pytorch.dispatch import context, tuning
from xpuruntime.pytorch.dispatch.context import thread_policy
from xpuruntime.pytorch.dispatch.tuning import as_tuning, measuring
from xpuruntime.pytorch.providers.canary_cases import CASES, order_of, own_kind, own_sizes
from xpuruntime.pytorch.providers.operations import OPERATIONS, laid_out
from xpuruntime.pytorch.providers.process_state import watched

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.ops.torch_kernels import TorchCall, TorchKernel
    from xpuruntime.pytorch.providers.canary_cases import Case

#: What evidence says of a call that is served without the comparison.
NOT_COMPARED = f"not compared with float64: {CANARY_VARIABLE} is off"

#: Why a kernel is left out of which nothing is known.
COMPARISON_ENDED = "its comparison with float64 was ended by watch_tuning"

#: What may be left of a result that is zero.
_LEAST = 1e-10
_USUAL = TuningPolicy()
#: Operations that round to the type of the inputs before they compute a result in a wider one.
_ROUNDED = ("linear_cross_entropy",)

_PASSED = "passed"
#: Seconds after which the comparison of a kernel that no policy names begins no further case.
_MOST_SECONDS = 60.0

_lock = threading.RLock()
_verdicts: dict[Any, str] = {}


class ComparisonEnded(Exception):  # noqa: N818 - it is no error
    """A comparison was ended by `watch_tuning`, so that nothing is known of the kernel."""


def canary_rejection(kernel: TorchKernel, call: TorchCall, describe: Callable[..., TorchCall]) -> str:
    """Return what a kernel computes wrong of an operation, with the numbers; empty where nothing was found.

    `describe` makes the description of a call, as `bound.call_of` does.
    """
    cases = own_kind if kernel.by_kind else CASES.get(call.op)
    if cases is None or (kernel.by_kind and call.phase == "backward"):  # which was compared with its forward
        return ""
    learns = call.phase in ("train", "backward") and not _writes(call.op)
    first = next(iter(call.operands.values()))
    dtype = getattr(torch, first.dtype)
    operands = ",".join(f"{name} {operand.dtype}" for name, operand in call.operands.items() if name != "grad")
    columns = first.shape[-1]  # for another size, a kernel may be another one
    stated = tuple((name, value) for name, value in call.attributes.items() if isinstance(value, (str, bool)))
    kind = f"{call.op};{operands};{columns};{stated};gradient={learns}"
    if kernel.by_kind:
        kind += f";{[(order_of(operand), [size == 1 for size in operand.shape]) for operand in call.operands.values()]}"
        kind += f";{own_sizes(call)}"
    key = f"canary;{kernel.id};{kind};{_device_name(call.device)}"
    automatic, late = measuring(), False
    mark = (kernel, key, automatic)  # what is left out for its time alone serves where a policy names it
    with _lock:
        if mark in _verdicts:
            return _verdicts[mark]
        held_by = _held_by(kernel)
        of_late = f"{key};automatic"
        known = tuned_records.recall(key, held_by, _USUAL)
        if known is None and automatic:
            known = tuned_records.recall(of_late, held_by, _USUAL)
            late = known is not None
        if known is None and context.capturing():
            return "it was not compared with float64 before the capture. Fix: run the step once before it is captured"
        if known is not None:
            verdict = known.candidates[0].config.removeprefix(_PASSED)
        else:
            begun = time.perf_counter()
            context.CONTEXT.prepared += 1
            ends = _Ends(kernel) if automatic else None
            verdict, lasting = _apart(
                lambda: _verdict(kernel, call, describe, cases, dtype, learns, ends), call.device, kernel
            )
            seconds = time.perf_counter() - begun
            if ends is not None and ends.cancelled:
                raise ComparisonEnded(verdict)
            late = ends is not None and ends.late
            tuning.log_long("comparison", f"comparing {kernel.id} with float64", seconds, result=verdict or _PASSED)
            if lasting or late:
                timing = KernelTiming(kernel.id, verdict or _PASSED, seconds * 1e6)
                replacement = Replacement((timing,), 1, seconds, undecided=False)
                tuned_records.keep(of_late if late else key, held_by, replacement)
        _verdicts.update({(kernel, key, way): verdict for way in ((True,) if late else (False, True))})
        return verdict


class _Ends:
    """Says when the comparison of a kernel that no policy names is to end: by a watch, or after so many seconds."""

    def __init__(self, kernel: TorchKernel) -> None:
        self.cancelled = self.late = False
        self._kernel = kernel
        self._step = TuningStep("torch", f"comparing {kernel.id} with float64")
        self._begun = time.monotonic()

    def __call__(self, cases: int) -> str:
        seconds = time.monotonic() - self._begun
        self.cancelled = self._step(1, cases, 0, seconds)
        if self.cancelled:
            return COMPARISON_ENDED
        self.late = seconds >= _MOST_SECONDS
        if not self.late:
            return ""
        why = f"its comparison with float64, compiling included, was not through after {_MOST_SECONDS:.0f} s"
        warn(f"{self._kernel.id} is not measured: {why}. Fix: name it in the policy, which waits for it")
        return why


def _device_name(device: str) -> str:
    return str(torch.cuda.get_device_name(device)) if device.startswith("cuda") else device


def _held_by(kernel: TorchKernel) -> dict[str, str]:
    from xpuruntime import __version__

    versions = {"xpuruntime": __version__, "torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    return versions | facts_of_kernel(kernel) | {"cases": canary_facts()["cases"]}


def _apart(run: Callable[[], tuple[str, bool]], device: str, kernel: TorchKernel) -> tuple[str, bool]:
    """Run something in a thread of its own, in which no mode, transform or policy of the caller's holds."""
    outcomes: list[tuple[str, bool]] = []
    ended: list[BaseException] = []

    def work() -> None:
        # Without threads of autograd, in which the policy of the process would hold.
        with thread_policy(None), as_tuning(), torch.autograd.set_multithreading_enabled(False):
            if device.startswith("cuda"):
                torch.cuda.set_device(device)
            try:
                with watched(kernel):
                    outcomes.append(run())
            except (KeyboardInterrupt, SystemExit) as error:  # which says nothing of the kernel
                ended.append(error)

    thread = threading.Thread(target=work, name="xpuruntime canary")
    thread.start()
    thread.join()
    if ended:
        raise ended[0]
    return outcomes[0] if outcomes else ("its comparison with float64 did not end", False)


def _verdict(
    kernel: TorchKernel,
    call: TorchCall,
    describe: Callable[..., TorchCall],
    cases: Callable[..., Iterator[Case]],
    dtype: torch.dtype,
    learns: bool,
    ends: Callable[[int], str] | None,
) -> tuple[str, bool]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(call.device)

    compared = False
    for number, case in enumerate(cases(random, call)):
        if ends is not None and (why := ends(number)):
            return why, False
        attributes = {**call.attributes, **case.attributes}
        described = {phase: describe(call.op, phase, case.operands, attributes) for phase in ("infer", "train")}
        try:
            if not kernel.supports(described["train" if learns else "infer"])[0]:
                continue
            compared = True
            wrong = _compare(kernel, described["train" if learns else "infer"], describe, case, attributes, learns)
        except XpuRuntimeError as error:
            return f"{case.what}: {error.reason}", False
        except Exception as error:  # whatever a kernel raises
            return f"{case.what}: it raised {type(error).__name__}: {error}", False
        if wrong:
            return f"it is wrong for {case.what}: {wrong}", True
    if not compared:
        return (
            f"it supports none of the inputs that it is compared for; {CANARY_VARIABLE}=off leaves the comparison out",
            True,
        )
    return "", True


def _compare(
    kernel: TorchKernel,
    call: TorchCall,
    describe: Callable[..., TorchCall],
    case: Case,
    attributes: Mapping[str, Any],
    learns: bool,
) -> str:
    """Return what is wrong with one case; empty where nothing is."""
    inputs = tuple(case.operands.values())
    before = [x.clone() for x in inputs]
    exact = [
        x.detach().to(torch.float64, copy=True).requires_grad_(learns) if x.is_floating_point() else x for x in inputs
    ]
    dense = call.op != "attention"  # other results lie in memory without gaps, whatever their inputs do
    rounded = inputs[0].dtype if call.op in _ROUNDED else None
    expected = _reference(call.op, dict(zip(case.operands, exact, strict=True)), attributes)
    with watched(kernel):  # the comparison itself goes on as before
        outputs, extra = kernel.forward(call, *inputs)
    outputs, extra = tuple(outputs), tuple(extra)
    if (writes := _writes(call.op)) and not outputs:
        expected, outputs = tuple(exact[:writes]), inputs[:writes]
    if len(outputs) != len(expected):
        return f"it returned {len(outputs)} outputs instead of {len(expected)}"
    linear = OPERATIONS[call.op].linear if call.op in OPERATIONS else ()
    for number, (x, y) in enumerate(zip(outputs, expected, strict=True)):
        like = y.contiguous() if dense else inputs[0] if x.shape == inputs[0].shape else None
        like = laid_out(y, inputs[number]) if linear else like
        if wrong := _difference("the output", x, y, like, rounded, _rounding_of_output(call.op, case, attributes)):
            return wrong
    if written := _written(case, before, writes):
        return written
    if kernel.deterministic is True and not writes:
        with watched(kernel):
            again, _ = kernel.forward(call, *inputs)
        if any(not torch.equal(x, y) for x, y in zip(outputs, again, strict=True)):
            return "two runs give different bits, and it says that they do not"
    if not learns:
        return ""
    grads = tuple(torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape).to(x) for x in outputs)
    if linear:
        grads = tuple(map(laid_out, grads, outputs))
    upstream = [grad.clone() for grad in grads]
    wanted = [x for x in exact if x.requires_grad]
    exact_grads = torch.autograd.grad(expected, wanted, [grad.double() for grad in grads], allow_unused=True)
    values = iter(exact_grads)
    of_inputs = [next(values) if x.requires_grad else None for x in exact]
    gradient = describe(call.op, "backward", {**case.operands, "grad": grads[0]}, attributes)
    with watched(kernel):
        gradients = kernel.backward(gradient, Saved(inputs, outputs, extra), grads)
    least: dict[str, float] = {}
    if not dense:
        least = _rounding(case, attributes, grads[0], outputs[0].double() - expected[0].detach())
    elif call.op in ("rms_norm", "layer_norm"):
        least = _rounding_of_norm(call.op, case, attributes, grads[0])
    elif call.op == "cross_entropy":
        least = {"logits": _rounding_of_loss(case, attributes) * float(grads[0].abs().max())}
    of_outputs = dict(zip(linear, grads, strict=False))
    for name, x, y in zip(case.operands, gradients, of_inputs, strict=False):
        like = case.operands[name].contiguous() if dense else case.operands[name]
        like = laid_out(like, of_outputs[name]) if name in of_outputs else like
        if y is None or x is None:
            continue
        if wrong := _difference(f"the gradient of {name}", x, y, like, rounded, least.get(name, _LEAST)):
            return wrong
    if any(not torch.equal(x, y) for x, y in zip(grads, upstream, strict=True)):
        return "its backward writes into the gradient that it gets, which other operations may read"
    return _written(case, before)


def _writes(op: str) -> int:
    return OPERATIONS[op].writes if op in OPERATIONS else 0


def _written(case: Case, before: Sequence[Tensor], writes: int = 0) -> str:
    pairs = list(zip(case.operands.items(), before, strict=True))[writes:]
    changed = [name for (name, x), y in pairs if not torch.equal(x, y)]
    return f"it writes into its input {changed[0]}" if changed else ""


def _difference(
    what: str,
    computed: Tensor,
    expected: Tensor,
    like: Tensor | None,
    rounded: torch.dtype | None,
    least: float = _LEAST,
) -> str:
    """Return how a result differs, by more than `least`, from that in float64, or from `like` in how it lies."""
    if computed.shape != expected.shape:
        return f"{what} has the shape {list(computed.shape)} instead of {list(expected.shape)}"
    steps = torch.empty_like(expected if like is None else like).stride()
    if any(a != b for size, a, b in zip(computed.shape, computed.stride(), steps, strict=True) if size > 1):
        return f"{what} has the strides {list(computed.stride())} instead of {list(steps)}"
    value, exact = computed.double(), expected.detach()
    if not bool(torch.isfinite(value).all()):
        return f"{what} has {int((~torch.isfinite(value)).sum())} numbers that are not finite"
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    error = float((value - exact).abs().max()) if exact.numel() else 0.0
    tolerance = max(
        KERNEL_TOLERANCES.get(str(dtype).removeprefix("torch."), KERNEL_TOLERANCES["float32"])
        for dtype in (computed.dtype, rounded or computed.dtype)
    )
    bound = max(tolerance * largest, least)
    return "" if error <= bound else f"{what} differs by {error:.3g} where {bound:.3g} is the bound"


def _rounding_of_output(op: str, case: Case, attributes: Mapping[str, Any]) -> float:
    """Return how far rounding to fp32 alone may move an output that can be zero, as what is subtracted there does."""
    if op == "layer_norm":
        moved, weight, _ = _rounding_of_rows(op, case, attributes)
        return max(float((moved * weight).max()), _LEAST)
    if op == "cross_entropy":
        rows = len(case.operands["target"]) if attributes["reduction"] == "sum" else 1
        return max(_rounding_of_loss(case, {"reduction": "none"}) * rows, _LEAST)
    return _LEAST


def _rounding_of_rows(op: str, case: Case, attributes: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return how far rounding moves each normalized number where a mean is subtracted, sizes of weights, and rstd."""
    x = case.operands["x"].double()
    weight = case.operands["weight"].double().abs() if "weight" in case.operands else x.new_ones(())
    spread = x.pow(2).mean(-1, keepdim=True) if op == "rms_norm" else x.var(-1, correction=0, keepdim=True)
    rstd = torch.rsqrt(spread + float(attributes["epsilon"]))
    step = torch.finfo(torch.float32).eps if op == "layer_norm" else 0.0
    return 2 * step * x.abs() * rstd, weight + (attributes.get("formula") == "gemma"), rstd


def _rounding_of_norm(op: str, case: Case, attributes: Mapping[str, Any], grad: Tensor) -> dict[str, float]:
    """Return how far rounding alone may move gradients, whose terms cancel where a row has a single column."""
    moved, weight, rstd = _rounding_of_rows(op, case, attributes)
    tolerance = KERNEL_TOLERANCES.get(str(grad.dtype).removeprefix("torch."), KERNEL_TOLERANCES["float32"])
    size = grad.double().abs()
    of_x = size * weight * rstd * (tolerance + moved * (1 + moved))
    return {"x": max(float(of_x.max()), _LEAST), "weight": max(float((size * moved).sum(0).max()), _LEAST)}


def _rounding_of_loss(case: Case, attributes: Mapping[str, Any]) -> float:
    """Return how far rounding a row's logsumexp to fp32 may move its loss, and its shares for a gradient of 1."""
    rows = max(1, len(case.operands["target"]) - 1) if attributes["reduction"] == "mean" else 1  # one is ignored
    return max(float(torch.finfo(torch.float32).eps * case.operands["logits"].abs().max()) / rows, _LEAST)


def _rounding(case: Case, attributes: Mapping[str, Any], grad: Tensor, off: Tensor) -> dict[str, float]:
    """Return how far rounding alone may move the gradients of queries and keys, in which terms can cancel."""
    # These are products by ``P * (dP - delta)``, which kernels round to the type of the inputs. ``delta`` is computed
    # of the output, which is `off` by its own rounding, and both are sums of head_dim products in fp32.
    weights, k, v = _weights(case.operands, attributes)
    size, grad, q = v.shape[-1], grad.double(), case.operands["q"].double()
    upstream = grad @ v.mT
    apart = (upstream - (weights * upstream).sum(-1, keepdim=True)).abs()
    step, wide = (torch.finfo(dtype).eps for dtype in (case.operands["q"].dtype, torch.float32))
    sums = min(step, wide) * size**0.5 * (grad.abs() @ v.abs().mT)
    moved = weights * (step * apart + (grad * off).abs().sum(-1, keepdim=True) + sums) * size**-0.5
    of_k = (moved.mT @ q.abs()).unflatten(1, (case.operands["k"].shape[1], -1)).sum(2)
    return {"q": float((moved @ k.abs()).max()), "k": float(of_k.max())}


def _reference(op: str, operands: dict[str, Tensor], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    if op == "attention":
        weights, _, v = _weights(operands, attributes)
        return (weights @ v,)
    if op == "layer_norm":
        x, weight, bias = (operands.get(name) for name in ("x", "weight", "bias"))
        assert x is not None
        return (torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, attributes["epsilon"]),)
    row = OPERATIONS[op]
    options = {name: value for name, value in attributes.items() if name not in ("paired", "needs")}
    results = row.reference(*(operands.get(name) for name in row.operands), **options)
    return (results,) if isinstance(results, torch.Tensor) else tuple(results or ())


def _weights(operands: Mapping[str, Tensor], attributes: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (operands[name].double() for name in "qkv")
    mask, scale, groups = operands.get("mask"), attributes["scale"], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    if attributes["causal"]:
        seen = seen.tril()
    if mask is not None:
        seen = seen & (mask.bool() if mask.dtype == torch.bool else torch.isfinite(mask))
        scores = scores if mask.dtype == torch.bool else scores + mask.masked_fill(~torch.isfinite(mask), 0)
    return torch.nan_to_num(torch.softmax(scores.masked_fill(~seen, -math.inf), -1)), k, v
