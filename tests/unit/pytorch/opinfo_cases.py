# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's own cases of its operators (OpInfo), run under a policy and held to what PyTorch gives without one."""

from __future__ import annotations

import functools
import itertools
import sys
import types
import unittest
import warnings
from collections import Counter
from typing import Any

import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xt

#: Name and variant of OpInfo to the operation of a KernelPolicy.
OPS = {
    "mm": "matmul",
    "addmm": "matmul",
    "addmm decomposed": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "addbmm": "matmul",
    "matmul": "matmul",
    "__rmatmul__": "matmul",
    "einsum": "matmul",
    "tensordot": "matmul",
    "inner": "matmul",
    "linalg.multi_dot": "matmul",
    "corrcoef": "matmul",
    "nn.functional.linear": "matmul",
    "nn.functional.bilinear": "matmul",
    "nn.functional.multi_head_attention_forward": "attention",
    "nn.functional.scaled_dot_product_attention": "attention",
    "native_layer_norm": "layer_norm",
    "nn.functional.layer_norm": "layer_norm",
    "nn.functional.rms_norm": "rms_norm",
    "nn.functional.conv1d": "conv",
    "nn.functional.conv2d": "conv",
    "nn.functional.conv3d": "conv",
    "nn.functional.conv_transpose2d": "conv",
}
#: Relative and absolute difference from PyTorch's own kernels: they sum in another order, and 16-bit ones round once
#: where PyTorch rounds several times.
TOLERANCES = {
    torch.float64: (1e-11, 1e-11),
    torch.float32: (1e-4, 1e-4),
    torch.bfloat16: (4e-2, 4e-2),
    torch.float16: (5e-3, 5e-3),
}


@functools.cache
def _database() -> dict[str, Any]:
    """Return the cases of `OPS`. It takes seconds."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ModuleNotFoundError:
            # PyTorch's test tools name a class of this package as a base of theirs; nothing of it is used here.
            module = types.ModuleType("expecttest")
            module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    # That import forbids the process to set switches such as torch.backends.cudnn.deterministic, as policies do.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    assert not torch.backends.flags_frozen()
    named = {f"{one.name} {one.variant_test_name}".strip(): one for one in op_db}
    return {name: named[name] for name in OPS}


class Case:
    """The samples of one operator on one device, and what a policy does to them.

    Parameters
    ----------
    name : str
        A key of `OPS`.
    device : str
    kernels : dict
        Of a KernelPolicy, such as ``{"matmul": "cpu.blas"}``.
    """

    def __init__(self, name: str, device: str, kernels: dict[str, str]) -> None:
        self.name = name
        self.device = device
        self.kernels = kernels
        self.info = _database()[name]

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype in self.info.supported_dtypes(self.device)

    def differentiates(self, dtype: torch.dtype) -> bool:
        return bool(self.info.supports_autograd) and dtype in self.info.supported_backward_dtypes(self.device)

    def forward(self, dtype: torch.dtype, most: int | None = None) -> Counter[str]:
        """Compare all results. Returns how often each kernel of ours ran."""
        return self._hold(self._samples(dtype, most=most), self._call, dtype)

    def backward(self, dtype: torch.dtype, most: int | None = None) -> Counter[str]:
        """Compare all gradients. Returns how often each kernel of ours ran."""
        return self._hold(self._samples(dtype, requires_grad=True, most=most), self._gradients, dtype)

    def _hold(self, samples: list[Any], call: Any, dtype: torch.dtype) -> Counter[str]:
        known = [(sample, self._native(lambda one=sample: call(one))) for sample in samples]
        served: Counter[str] = Counter()
        passing = [(sample, expected[0]) for sample, expected in known if expected is not None]
        found = self._under(lambda: [call(sample) for sample, _ in passing], served)
        for one, (sample, expected) in zip(found, passing, strict=True):
            exact = None
            if dtype in (torch.bfloat16, torch.float16):
                exact = self._native(lambda given=sample: call(given.transform(_widen)))
            output = self._of_a_rounded_output(sample) if call == self._gradients else 0.0
            self._compare(one, expected, sample, dtype, None if exact is None else exact[0], output)
        return served

    def gradcheck(self, most: int) -> int:
        """Check gradients, those of gradients, and forward mode, by finite differences. Returns of how many samples."""
        checked = 0
        info = self.info
        for sample in self._samples(torch.float64, requires_grad=True, most=most):
            inputs = [tensor for tensor in _tensors(sample) if tensor.requires_grad]
            if not inputs:
                continue
            checks = {
                "gradcheck": lambda f, given=inputs: torch.autograd.gradcheck(f, given, fast_mode=True),
                "forward mode": lambda f, given=inputs: torch.autograd.gradcheck(
                    f, given, fast_mode=True, check_forward_ad=True, check_backward_ad=False
                ),
                "gradgradcheck": lambda f, given=inputs: torch.autograd.gradgradcheck(f, given, fast_mode=True),
            }
            if not info.supports_forward_ad:
                del checks["forward mode"]
            if not info.supports_gradgrad:
                del checks["gradgradcheck"]
            function = self._function(sample)
            for what, check in checks.items():
                self._passes_as_natively(what, sample, lambda c=check, f=function: c(f))
            checked += 1
        return checked

    def errors(self) -> int:
        """Hold wrong arguments to PyTorch's own type and text of the error. Returns how many there were."""
        count = 0
        if self.info.error_inputs_func is None:
            return 0
        for error in self.info.error_inputs(torch.device(self.device)):
            sample = error.sample_input
            expected = _error(lambda one=sample: self._call(one))
            found = self._under(lambda one=sample: _error(lambda: self._call(one)), Counter())
            assert (type(found), str(found)) == (type(expected), str(expected)), f"{self.name}: {_text(sample)}"
            count += 1
        return count

    def out(self, dtype: torch.dtype, most: int) -> int:
        """Give results where to go: dense, transposed, too small, of another dtype. Returns how many were written."""
        written = 0
        for sample in self._samples(dtype, most=most):
            expected = self._native(lambda one=sample: self._call(one))
            if expected is None or not isinstance(expected[0], torch.Tensor):
                continue
            result = expected[0]
            transposed = torch.full_like(result.mT.contiguous(), torch.nan).mT if result.dim() > 1 else result.clone()
            for make in (
                lambda like=result: torch.full_like(like, torch.nan),
                lambda like=transposed: like.clone(memory_format=torch.preserve_format),
                lambda: torch.empty(0, dtype=dtype, device=self.device),
                lambda like=result: torch.empty(like.shape, dtype=torch.int64, device=self.device),
            ):
                first, second = make(), make()
                wanted = _error(lambda one=sample, out=first: self._call(one, out=out))
                error = self._under(lambda one=sample, out=second: _error(lambda: self._call(one, out=out)), Counter())
                assert (type(error), str(error)) == (type(wanted), str(wanted)), f"{self.name}: {_text(sample)}"
                if wanted is None:
                    assert second.stride() == first.stride(), f"{self.name}: {_text(sample)}"
                    self._compare(second, first, sample, dtype)
                    written += 1
        return written

    def _samples(self, dtype: torch.dtype, requires_grad: bool = False, most: int | None = None) -> Any:
        torch.manual_seed(0)
        samples = self.info.sample_inputs(self.device, dtype, requires_grad=requires_grad)
        usable = (sample for sample in samples if not sample.kwargs.get("dropout_p"))  # which no two kernels draw alike
        return list(itertools.islice(usable, most))

    def _call(self, sample: Any, **more: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)
            return self.info.op(sample.input, *sample.args, **sample.kwargs, **more)

    def _gradients(self, sample: Any) -> list[Any]:
        inputs = [tensor for tensor in _tensors(sample) if tensor.requires_grad]
        results = [one for one in _flat(self._result(sample)) if one.requires_grad]
        if not results or not inputs:
            return []
        weights = [
            torch.linspace(0.5, 1.5, result.numel(), device=result.device).reshape(result.shape) for result in results
        ]
        grads = torch.autograd.grad(
            results, inputs, [weight.to(result.dtype) for weight, result in zip(weights, results, strict=True)],
            allow_unused=True,
        )  # fmt: skip
        return [grad for grad in grads if grad is not None]

    def _result(self, sample: Any) -> Any:
        found = self._call(sample)
        process = sample.output_process_fn_grad
        return found if process is None else process(found)

    def _function(self, sample: Any) -> Any:
        places = [(tensor, tensor.requires_grad) for tensor in _tensors(sample)]

        def function(*inputs: Any) -> Any:
            given = iter(inputs)
            replaced = {id(one): next(given) if wanted else one for one, wanted in places}
            again = sample.transform(lambda one: replaced.get(id(one), one) if isinstance(one, torch.Tensor) else one)
            results = [one for one in _flat(self._result(again)) if one.is_floating_point() and one.requires_grad]
            return tuple(results) if len(results) != 1 else results[0]

        return function

    def _native(self, call: Any) -> Any:
        """Return the result in a tuple, or nothing where PyTorch itself raises."""
        try:
            return (call(),)
        except RuntimeError:
            return None

    def _under(self, call: Any, served: Counter[str]) -> Any:
        xrt.clear_decisions()
        with warnings.catch_warnings():
            # What our kernels do not take is PyTorch's to do, and said; these tests are about the results.
            warnings.simplefilter("ignore", xrt.errors.XpuRuntimeWarning)
            with xt.kernel_policy(**self.kernels):
                under = call()
        for decision in xrt.decisions():
            served[decision.chosen] += decision.count
        return under

    def _passes_as_natively(self, what: str, sample: Any, check: Any) -> None:
        try:
            self._under(check, Counter())
        except Exception as error:
            try:
                check()
            except Exception:
                return  # it fails without a policy too
            raise AssertionError(f"{self.name}, {what} of {_text(sample)}") from error

    def _of_a_rounded_output(self, sample: Any) -> float:
        """Return how far gradients of attention may be off, absolutely, because its output is kept in its own dtype.

        The backward pass of flash attention takes what it subtracts from the gradient of the scores, the sum of
        gradient times output, from that output; PyTorch's own plain formula sums in fp32.
        """
        if self.name != "nn.functional.scaled_dot_product_attention":
            return 0.0
        query, key = sample.input.detach(), sample.args[0].detach()
        with torch.no_grad():
            subtracted = 1.5 * self._call(sample).float().abs().sum(-1)  # `_gradients` asks for those of up to 1.5
        sums = float(subtracted.max() * key.abs().max()), float(subtracted.sum(-1).max() * query.abs().max())
        return torch.finfo(query.dtype).eps / 2 * max(sums) * query.shape[-1] ** -0.5

    def _compare(
        self, found: Any, expected: Any, sample: Any, dtype: torch.dtype, exact: Any = None, more: float = 0.0
    ) -> None:
        relative, absolute = TOLERANCES.get(dtype, (0, 0))
        absolute += more
        ours, theirs = list(_flat(found)), list(_flat(expected))
        assert len(ours) == len(theirs)
        truth = [None] * len(ours) if exact is None else list(_flat(exact))
        for one, other, true in zip(ours, theirs, truth, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), f"{self.name} of {_text(sample)}"
            if true is not None and _error_of(one, true) <= 1.5 * _error_of(other, true):
                continue  # 16 bits may be far from the other 16 bits, and as near to the truth
            torch.testing.assert_close(
                one, other, rtol=relative, atol=absolute, equal_nan=True,
                msg=lambda text: f"{self.name} of {_text(sample)}: {text}",
            )  # fmt: skip


def _error(call: Any) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().float().requires_grad_(value.requires_grad)
    return value


def _error_of(found: torch.Tensor, true: torch.Tensor) -> float:
    return (found.detach().float() - true.detach()).abs().nan_to_num().max().item() if found.numel() else 0.0


def _tensors(sample: Any) -> list[Any]:
    found: dict[int, Any] = {}
    for one in _flat((sample.input, sample.args, sample.kwargs)):
        found.setdefault(id(one), one)
    return list(found.values())


def _flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def _text(sample: Any) -> str:
    def show(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return f"{list(one.shape)} by {list(one.stride())}"
        return one

    parts = [show(sample.input), *map(show, sample.args), *(f"{k}={show(v)}" for k, v in sample.kwargs.items())]
    return ", ".join(map(str, parts))
