# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`BoundKernel`: a `TorchKernel` that a route leads to, with its limits and its results checked."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeError
from xpuruntime.ops.torch_kernels import (
    Operand,
    Saved,
    TorchCall,
    TorchKernel,
    automatic_torch_kernels,
    compares,
    find_torch_kernel,
    is_torch_kernel,
    missing_distributions,
)
from xpuruntime.policies.advisories import AdvisedCall, Platform, advisories, holding
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import CONTEXT, thread_policy
from xpuruntime.pytorch.providers.canary import ComparisonEnded, canary_rejection
from xpuruntime.pytorch.providers.operations import OPERATIONS
from xpuruntime.pytorch.providers.process_state import changes_of, watched

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.policies.advisories import Advisory

#: Answers of `supports` that are kept for one kernel; with one more, all are forgotten.
_MOST = 4096
_ALIGNED, _ALIGNED_ON_CPU = 256, 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Integers by how many bytes they have.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Attributes of norms that are called as operators of PyTorch's, whose gradient has no epsilon.
_NORM = {"formula": "torch", "paired": False}


def call_of(
    op: str,
    phase: str,
    operands: Mapping[str, Tensor | None],
    attributes: Mapping[str, Any],
    *,
    deterministic: bool = False,
) -> TorchCall:
    """Return the description of a call; operands that are ``None`` are left out."""
    present = [(name, x) for name, x in operands.items() if x is not None]
    exact = deterministic or torch.are_deterministic_algorithms_enabled()
    plain = all(type(x) in _PLAIN for _, x in present)
    described = _described if plain else _described.__wrapped__
    kinds = [(name, x.dtype, x.shape, x.stride(), alignment_of(x)) for name, x in present]
    device = present[0][1].device
    return described(op, phase or context.phase(), device, tuple(kinds), tuple(attributes.items()), exact)


@functools.lru_cache(maxsize=4096)
def _described(
    op: str, phase: str, device: torch.device, kinds: tuple[Any, ...], attributes: tuple[Any, ...], exact: bool
) -> TorchCall:
    return TorchCall(
        op=op,
        phase=phase,
        device=str(device),
        arch=context.arch_of(device) or "",
        operands={
            name: Operand(
                str(dtype).removeprefix("torch."), tuple(map(int, shape)), tuple(map(int, strides)), alignment
            )
            for name, dtype, shape, strides, alignment in kinds
        },
        attributes=dict(attributes),
        deterministic=exact,
    )


class BoundKernel:
    """A kernel of another package in the place of one of this library. Threads share one."""

    #: Where kernels of the core keep their decisions; this one keeps none.
    site = None

    def __init__(self, kernel: TorchKernel, word: str) -> None:
        self.kernel = kernel
        self.word = word
        #: Whether its repository is signed, for evidence; empty for what comes from none of the Hub.
        self.signature = getattr(kernel, "signature", "")
        self._answers: dict[Any, str] = {}
        self._served: dict[Any, Any] = {}
        #: What it has not run yet in this process; its first run may import its package.
        self._unused = set() if kernel.alone else {"forward", "backward"}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"BoundKernel({self.kernel.id} for {self.kernel.op})"

    def rejection(self, call: TorchCall) -> str:
        """Return why it cannot serve a call; empty where it can."""
        if context.capturing() and self.kernel.capturable is not True:
            return f"it cannot be captured into a CUDA graph: {self.kernel.capturable}"
        key = (compares(), CONTEXT.thread.measuring, *_private_api.compile_stance(), call.key)
        answer = self._answers.get(key)
        if answer is None:
            try:
                answer = self._rejection(call)
            except ComparisonEnded as ended:
                return str(ended)
            with self._lock:
                if len(self._answers) >= _MOST:
                    self._answers.clear()
                self._answers[key] = answer
        return answer or self._refused_change()

    def _refused_change(self) -> str:
        """Return what it changed in the process, which strict policies refuse; empty under others."""
        active = context.active_policy()
        changes = changes_of(self.kernel)
        return str(changes) if changes.restored and active is not None and active.strict else ""

    def _rejection(self, call: TorchCall) -> str:
        if call.deterministic and self.kernel.deterministic is not True:
            return f"its bits differ from run to run: {self.kernel.deterministic}"
        if not next(iter(call.operands.values())).shape:
            return "it computes rows, and a tensor without dimensions has none. Fix: use x.reshape(1)"
        try:
            fits, why = self.kernel.supports(call)
        except Exception as error:
            return f"its supports() raised {type(error).__name__}: {error}"
        if not fits:
            return str(why or "it gives no reason")
        if (known := _advisory_of(self.kernel, call)) is not None:
            return str(known)
        computes = call.device != "meta"  # whose tensors have no values: the operator answers with their shapes
        return canary_rejection(self.kernel, call, call_of) if computes and compares() else ""

    def _check(self, call: TorchCall) -> None:
        reason = self.rejection(call)
        if reason:
            raise UnsupportedOperationError(f"{self.word}: {reason}", engine="torch") from None

    def forward(
        self, call: TorchCall, tensors: Sequence[Tensor], like: Sequence[Tensor], saved: int | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return outputs and what is saved, checked against `like`, tensors that lie in memory as outputs have to."""
        self._check(call)
        return self.run_forward(call, tensors, like, saved)

    def run_forward(
        self, call: TorchCall, tensors: Sequence[Tensor], like: Sequence[Tensor], saved: int | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Do as `forward`, of a call of which it is known that it can be served."""
        outputs, extra = self._run(call, "forward", self.kernel.forward, call, *tensors)
        extra = tuple(extra)
        if saved is not None and len(extra) != saved:
            raise self._wrong(call, f"saved {len(extra)} tensors, and {saved} are to be saved")
        return self._checked(call, "output", outputs, like), extra

    def backward(
        self, call: TorchCall, saved: Saved, grads: Sequence[Tensor], like: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return a gradient for each of `like`, which lie in memory as these do; ``None`` where that is ``None``."""
        self._check(call)
        return self.run_backward(call, saved, grads, like)

    def run_backward(
        self, call: TorchCall, saved: Saved, grads: Sequence[Tensor], like: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Do as `backward`, of a call of which it is known that it can be served."""
        gradients = list(self._run(call, "backward", self.kernel.backward, call, saved, grads))
        wanted = [x for x in like if x is not None]
        if len(gradients) != len(like):
            raise self._wrong(call, f"returned {len(gradients)} gradients, and there are {len(like)} inputs")
        kept = self._checked(
            call, "gradient", [x for x, y in zip(gradients, like, strict=True) if y is not None], wanted
        )
        values = iter(kept)
        return tuple(None if x is None else next(values) for x in like)

    def saved_like(self, call: TorchCall, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors as the forward saves them, without data."""
        if call.op == "rms_norm":
            wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
            return (tensors[0].new_empty(tensors[0].shape[:-1], dtype=wide),)
        return tuple(self.kernel.saved_like(call, *tensors))

    def _run(self, call: TorchCall, what: str, function: Any, *args: Any) -> Any:
        if self.kernel.alone:
            return self._run_used(call, what, function, *args)
        inputs = _only_read(call, what, args)
        if what not in self._unused:
            versions = _versions(inputs)
            results = self._run_used(call, what, function, *args)
            if _versions(inputs) != versions:
                raise self._writes(call, what)
            return results
        sums = None if context.capturing() else _sums(inputs)
        with watched(self.kernel):
            results = self._run_used(call, what, function, *args)
        self._unused.discard(what)
        if sums is not None and _sums(inputs) != sums:
            raise self._writes(call, what)
        if why := self._refused_change():
            raise UnsupportedOperationError(f"{self.word}: {why}", engine="torch")
        return results

    def _run_used(self, call: TorchCall, what: str, function: Any, *args: Any) -> Any:
        device = call.device.partition(":")[0]
        before, casts = CONTEXT.thread.policy, not self.kernel.alone and torch.is_autocast_enabled(device)
        try:
            if self.kernel.alone:
                CONTEXT.thread.policy = (None,)  # fast kernels need not know: it calls none
                return function(*args)
            if casts:  # it was compared with float64, and compiled, without
                torch.set_autocast_enabled(device, False)
            with thread_policy(None):  # its own operators are no calls of the program's, which a policy would refuse
                return function(*args)
        except XpuRuntimeError:
            raise
        except Exception as error:
            error.add_note(f"raised by {self.word} in the {what} of {call}")
            raise
        finally:
            if self.kernel.alone:
                CONTEXT.thread.policy = before
            if casts:
                torch.set_autocast_enabled(device, True)

    def _checked(
        self, call: TorchCall, what: str, results: Sequence[Any], like: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        results = tuple(results)
        if self.kernel.alone:
            return results
        if len(results) != len(like):
            raise self._wrong(call, f"returned {len(results)} {what}s, and there are {len(like)}")
        for number, (x, wanted) in enumerate(zip(results, like, strict=True)):
            if not isinstance(x, torch.Tensor):
                raise self._wrong(call, f"returned {type(x).__name__} as {what} {number}")
            for name in ("shape", "dtype"):
                if getattr(x, name) != getattr(wanted, name):
                    has, needs = (_shown(getattr(tensor, name)) for tensor in (x, wanted))
                    raise self._wrong(call, f"returned {what} {number} with {name} {has}, and it has to be {needs}")
            if str(x.device) != call.device:
                raise self._wrong(call, f"returned {what} {number} on {x.device}, and it has to be on {call.device}")
            if x.stride() != wanted.stride() and x.numel() > 1 and _steps(x) != _steps(wanted):
                steps = f"strides {list(x.stride())}, and they have to be {list(wanted.stride())}"
                raise self._wrong(call, f"returned {what} {number} with {steps}")
        return results

    def _writes(self, call: TorchCall, what: str) -> XpuRuntimeError:
        """Return an error that no other kernel stands in for: the numbers of the program are no longer its own."""
        msg = f"{self.word}: its {what} wrote into a tensor that it was to read, for {call}"
        return XpuRuntimeError(msg, fix="leave it out of the policy, and start the program again", engine="torch")

    def _wrong(self, call: TorchCall, what: str) -> UnsupportedOperationError:
        msg = f"{self.word}: it {what}, for {call}"
        return UnsupportedOperationError(msg, fix="use a kernel that keeps to the operation", engine="torch")

    # --- norms, whose operators are PyTorch's

    def norm(
        self,
        phase: str,
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        *,
        rms: bool,
    ) -> tuple[Tensor, ...]:
        """Return the norm over the last dimensions, and mean and rstd, or rstd alone of an RMS norm."""
        rows, columns = (
            _rows(x, len(shape)),
            [None if parameter is None else parameter.reshape(-1) for parameter in (weight, bias)],
        )
        operands = {"x": rows, "weight": columns[0], "bias": columns[1]}
        call = call_of("rms_norm" if rms else "layer_norm", phase, operands, {"epsilon": float(eps), **_NORM})
        tensors = [operand for operand in operands.values() if operand is not None]
        outputs, stats = self.forward(call, tensors, [dense_like(rows)], saved=1 if rms else 2)
        lead = (*x.shape[: -len(shape)], *(1,) * len(shape))
        return outputs[0].view(x.shape), *(stat.view(lead) for stat in stats)

    def norm_backward(
        self,
        grad: Tensor,
        x: Tensor,
        shape: Sequence[int],
        stats: Sequence[Tensor],
        weight: Tensor | None,
        bias: Tensor | None,
        *,
        rms: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of the input, the weight and the bias; ``None`` where there is none."""
        n = len(shape)
        rows, of_rows = _rows(x, n), _rows(grad, n)
        columns = [None if parameter is None else parameter.reshape(-1) for parameter in (weight, bias)]
        operands = {"x": rows, "weight": columns[0], "bias": columns[1]}
        call = call_of("rms_norm" if rms else "layer_norm", "backward", {**operands, "grad": of_rows}, _NORM)
        inputs = tuple(operand for operand in operands.values() if operand is not None)
        extra = tuple(stat.reshape(rows.shape[:-1]) for stat in stats)
        like = [dense_like(input_) for input_ in inputs]
        gradients = iter(self.backward(call, Saved(inputs, (), extra), (of_rows,), like))
        of_x, of_weight, of_bias = (next(gradients) if column is not None else None for column in (rows, *columns))
        return (
            None if of_x is None else of_x.view(x.shape),
            None if of_weight is None else of_weight.view(*shape),
            None if of_bias is None else of_bias.view(*shape),
        )

    # --- attention, of tensors [batch, heads, length, head_dim]

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        want_lse: bool,
        phase: str,
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention, and the scores' logsumexp where it is wanted."""
        operands = {"q": q, "k": k, "v": v, "mask": mask}
        phase = phase or ("train" if want_lse else context.phase())
        tensors = [operand for operand in operands.values() if operand is not None]
        key, known = self._known(phase, is_causal, scale, *operands.values())
        if known is None:
            call = call_of("attention", phase, operands, {"causal": is_causal, "scale": scale})
            like = [torch.empty_like(q, device="meta")]
            known = call, like, [q.new_empty(q.shape[:3], dtype=torch.float32, device="meta")]
            self._check(call)
            self._keep(key, known)
        call, like, like_lse = known
        (out,), extra = self.run_forward(call, tensors, like, saved=1)
        lse = self._checked(call, "saved tensor", extra, like_lse)[0]
        return out, lse if want_lse else None

    def attention_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of `attention` for queries, keys and values."""
        operands = {"q": q, "k": k, "v": v, "mask": mask, "grad": grad}
        inputs = tuple(operand for operand in (q, k, v, mask) if operand is not None)
        key, known = self._known("backward", is_causal, scale, *operands.values())
        if known is None:
            call = call_of("attention", "backward", operands, {"causal": is_causal, "scale": scale})
            like = [torch.empty_like(operand, device="meta") for operand in (q, k, v)] + [None] * (len(inputs) - 3)
            known = call, like, []
            self._check(call)
            self._keep(key, known)
        call, like, _ = known
        gradients = self.run_backward(call, Saved(inputs, (out,), (lse,)), (grad,), like)
        of_q, of_k, of_v = (x for x in gradients if x is not None)
        return of_q, of_k, of_v

    def _known(self, phase: str, causal: bool, scale: float | None, *arrays: Tensor | None) -> tuple[Any, Any]:
        """Return a key of a call, ``None`` where it has none, and what is known of such calls: that they are served."""
        seen = context.call_key(phase, *arrays) if self.kernel.capturable is True else None
        key = None if seen is None else (seen, causal, scale, torch.are_deterministic_algorithms_enabled())
        return key, None if key is None else self._served.get(key)

    def _keep(self, key: Any, known: Any) -> None:
        if key is not None:
            with self._lock:
                if len(self._served) >= _MOST:
                    self._served.clear()
                self._served[key] = known


def _only_read(call: TorchCall, what: str, args: tuple[Any, ...]) -> list[Tensor]:
    if what == "forward":
        given = args[1 + (OPERATIONS[call.op].writes if call.op in OPERATIONS else 0) :]
    else:
        given = (*args[1].inputs, *args[1].outputs, *args[1].extra, *args[2])
    return [x for x in given if type(x) in _PLAIN]


def _versions(tensors: list[Tensor]) -> list[int]:
    """Return how often PyTorch's operators have written tensors; those of inference do not say it."""
    return [0 if x.is_inference() else _private_api.tensor_version(x) for x in tensors]


def _sums(tensors: list[Tensor]) -> list[int]:
    """Return sums of the bits of tensors, which another number anywhere changes as a rule."""
    words = [x.detach().view(_WORDS[x.element_size()]) for x in tensors if x.element_size() in _WORDS and not x.is_meta]
    return [int(word.sum(dtype=torch.int64)) for word in words]


def dense_like(x: Tensor) -> Tensor:
    """Return the form of what a kernel has to return for a tensor, dense, which takes no memory."""
    return torch.empty_like(x, device="meta", memory_format=torch.contiguous_format)


def alignment_of(x: Tensor) -> int:
    """Return the largest power of two up to 256, on the CPU 64, that divides an address; 256 where it is not known.

    PyTorch aligns memory of the CPU by 64, and what some of it has beyond that by chance makes no call another one.
    """
    known = type(x) in _PLAIN and not x.is_meta and not _private_api.has_transforms()  # whose tensors have no memory
    address = x.data_ptr() if known else 0
    return min(address & -address, _ALIGNED if x.is_cuda else _ALIGNED_ON_CPU) if address else _ALIGNED


def _advisory_of(kernel: TorchKernel, call: TorchCall) -> Advisory | None:
    rows = [row for row in advisories() if kernel.id in row.kernels and row.op == call.op]
    if not rows:
        return None
    facts = AdvisedCall(call.phase in ("train", "backward"), "", False, None, None)
    if call.op == "attention":
        q, k, mask = (call.operands.get(name) for name in ("q", "k", "mask"))
        assert q is not None
        kinds = {"bool": "boolean", q.dtype: "same"}
        facts = facts._replace(
            mask="" if mask is None else kinds.get(mask.dtype, "other"), causal=bool(call.attributes["causal"]),
            queries=q.shape[2], keys=None if k is None else k.shape[2],
        )  # fmt: skip
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    platform = Platform(version, (), call.arch or "cpu")
    return next((row for row in holding(platform, rows) if row.concerns(kernel.id, facts)), None)


def _shown(value: Any) -> str:
    return str(list(value) if isinstance(value, torch.Size) else value)


def _steps(x: Tensor) -> tuple[tuple[int, int], ...]:
    """Return sizes and strides without the dimensions of one element, whose stride means nothing."""
    return tuple((size, step) for size, step in zip(x.shape, x.stride(), strict=True) if size != 1)


def _rows(x: Tensor, n: int) -> Tensor:
    """Return a view, or where there is none a copy, with the last `n` dimensions as one, all of it dense."""
    return x.detach().contiguous().flatten(-n) if n > 1 else x.detach().contiguous()


@functools.lru_cache(maxsize=256)
def _bound(kernel: TorchKernel, word: str) -> BoundKernel:
    return BoundKernel(kernel, word)


def bound_kernel(word: str, op: str) -> BoundKernel | None:
    """Return the kernel that a word of a policy means for an operation; ``None`` where that is no `TorchKernel`."""
    if not is_torch_kernel(word):
        return None
    try:
        kernel = find_torch_kernel(word, op)
    except InputError:
        return None
    return None if kernel is None else _bound(kernel, word)


def automatic_kernels(
    op: str, device: torch.device, *, deterministic: bool, skip: Sequence[tuple[str, str]] = ()
) -> list[BoundKernel]:
    """Return the kernels of installed packages that measured times may choose for an operation on a device."""
    passed_over = dict(skip)
    replayed = bool(context.CONTEXT.replays) or context.capturing()
    return [
        _bound(kernel, kernel.id)
        for kernel in automatic_torch_kernels(op, device.type)
        if kernel.id not in passed_over
        and (kernel.capturable is True or not replayed)
        and (kernel.deterministic is True or not deterministic)
    ]


def rejection_of_word(word: str, op: str) -> str:
    """Return why a word that means a `TorchKernel` can serve no call of an operation; empty where it may."""
    if not is_torch_kernel(word):
        return ""
    try:
        kernel = find_torch_kernel(word, op)
    except InputError as error:
        return error.reason
    if kernel is None:
        return f"it has no kernel for {op}"
    return missing_distributions(kernel)
