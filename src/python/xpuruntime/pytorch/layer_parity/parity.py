# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`parity`: a module compared with the session or the module that takes its place, layer by layer."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import torch

from xpuruntime.errors import InputError
from xpuruntime.evidence.tolerances import TOLERANCES, compare_within, same_bits
from xpuruntime.generation.logprobs import LogprobSource, SessionLogprobs, normalized, token_ids
from xpuruntime.pytorch.generation.logprobs import TorchLogprobs, logprobs_of
from xpuruntime.pytorch.layer_parity.module_outputs import ModuleOutputs, call_of, feeds_and_call, for_session
from xpuruntime.pytorch.layer_parity.result import LayerParity, LogprobParity, Parity

if TYPE_CHECKING:
    from xpuruntime.evidence.tolerances import OutputFigures, Tolerance

__all__ = ["parity"]

_PRECISION = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Session(Protocol):
    """What is needed of a session; `InferenceSession` is one."""

    @property
    def model(self) -> Any: ...
    @property
    def plan(self) -> Any: ...
    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]: ...
    def intermediates(self, inputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]: ...


def parity(
    model: torch.nn.Module | LogprobSource,
    session: Session | torch.nn.Module | LogprobSource,
    inputs: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    cosine: float | None = None,
) -> Parity:
    """Run a module and what takes its place on the same inputs, and compare them module by module.

    Parameters
    ----------
    model : torch.nn.Module, or what `logprobs_of` returns
        In evaluation mode; it runs as the caller has set it up, kernel policies included.
    session : InferenceSession, torch.nn.Module, or LogprobSource
        Of the same model: of the file that `export` wrote, of the module itself, or another module with the same
        structure. Of prompts also what `logprobs_of` returns, and any other `LogprobSource`.
    inputs : tensor, sequence, mapping of str to tensor, or prompts
        What `model` is called with, as `export` takes it: by position, or by the names of ``forward``'s parameters or
        of the session's inputs. A list of lists of token ids are prompts: compared is then what both say about each
        next token in them, and the layers of the first prompt that differs.
    rtol, atol : float, optional
        The largest difference allowed in a result is ``atol + rtol * max(abs(result of the module))``. Default: by the
        lower of the two precisions, such as 1e-4 and 1e-5 for fp32 and 1e-2 and 1e-3 for fp16.
    cosine : float, optional
        The least cosine of the two results as vectors.

    Returns
    -------
    Parity
        Printable. A module whose results are not one by one in the session's graph is under `Parity.skipped`.

    Raises
    ------
    InputError
        The inputs do not fit.
    ModelError
        The module is in training mode.

    Notes
    -----
    Slow: the session's model is run once more for the tensors inside of it; see `InferenceSession.intermediates`.

    Examples
    --------
    >>> import torch, xpuruntime as xrt, xpuruntime.pytorch as xrt_torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).eval()
    >>> x = torch.ones(2, 4)
    >>> with xrt.InferenceSession(model, device="cpu", example_inputs=(x,)) as session:
    ...     xrt_torch.parity(model, session, x).agreed
    True
    """
    reference = model if isinstance(model, TorchLogprobs) else None
    module: Any = model if reference is None else reference.model
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"parity takes a torch.nn.Module, got a {type(model).__name__}")
    reference = reference or logprobs_of(module)
    limits = _limits(module, session, rtol, atol, cosine)
    if _are_prompts(inputs):
        return _prompts_parity(reference, session, inputs, limits)
    if not _has_layers(session):
        raise InputError(
            f"parity takes an InferenceSession, got a {type(session).__name__}: open one of the model, or give a "
            "torch.nn.Module"
        )
    what = f"<{type(module).__qualname__}>"
    with reference.running():
        if _module_of(session) is None:
            names = [info.name for info in session.model.inputs]  # type: ignore[union-attr]
            feeds, args, kwargs = feeds_and_call(module, inputs, names, what)
        else:
            feeds, args, kwargs = {}, *call_of(module, inputs, what)
    layers, skipped = _layers(reference, session, feeds, args, kwargs, limits)
    return _parity(what, session, limits, layers, skipped)


def _parity(
    what: str,
    session: Any,
    limits: Tolerance,
    layers: Sequence[LayerParity],
    skipped: dict[str, str],
    logprobs: LogprobParity | None = None,
) -> Parity:
    module, plan = _module_of(session), getattr(session, "plan", None)
    if module is not None:
        other = f"<{type(module).__qualname__}>"
    else:
        other = (
            f"<{type(session).__qualname__}>"
            if plan is None
            else f"{session.model.path} on {plan.engine}@{plan.device}"
        )
    return Parity(
        model=what,
        session=other,
        rtol=limits.rtol,
        atol=limits.atol,
        cosine=limits.cosine,
        layers=tuple(layers),
        skipped=skipped,
        logprobs=logprobs,
    )


def _module_of(other: Any) -> torch.nn.Module | None:
    module = other.model if isinstance(other, TorchLogprobs) else other
    return module if isinstance(module, torch.nn.Module) else None


def _has_layers(other: Any) -> bool:
    return _module_of(other) is not None or hasattr(other, "intermediates")


def _layers(
    reference: TorchLogprobs,
    session: Any,
    feeds: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    limits: Tolerance,
) -> tuple[list[LayerParity], dict[str, str]]:
    seen = _Hooks(reference.model)
    with seen.watching(), reference.running():
        reference.model(*args, **kwargs)
    final = seen.calls[-1]
    other = _module_of(session)
    if other is not None:
        hooks = _Hooks(other)
        source = session if isinstance(session, TorchLogprobs) else logprobs_of(other)
        with hooks.watching(), source.running():
            other(*args, **kwargs)
        skipped: dict[str, str] = {}
        ours = {(call.path, call.number): call for call in hooks.calls}
        layers = []
        for call in seen.calls:
            match = ours.get((call.path, call.number))
            if match is None or len(match.values) != len(call.values):
                skipped[call.path or "(results)"] = (
                    "the other module has no such call" if match is None else
                    f"it gives {len(call.values)} tensors, and {len(match.values)} in the other module"
                )  # fmt: skip
                continue
            layers += [
                _layer(call, index, want, call.path, theirs, limits, skipped)
                for index, (want, theirs) in enumerate(zip(call.values, match.values, strict=True))
            ]
        return [layer for layer in layers if layer is not None], skipped
    arrays = {name: for_session(value, session) for name, value in feeds.items()}
    outputs = ModuleOutputs(session.model)
    pairs, skipped = _pairs(seen, outputs)
    wanted = dict.fromkeys(tensor for *_, tensor in pairs)
    got = dict(session.intermediates(arrays, list(wanted)))
    results = dict(session.run(arrays))
    layers = []
    for call, index, value, tensor in pairs:
        if tensor not in got:
            skipped[call.path] = f"the session made no tensor {tensor!r}: control flow depends on the inputs"
            continue
        layers.append(_layer(call, index, value, tensor, got[tensor], limits, skipped))
    if len(final.values) == len(results):
        layers += [
            _layer(final, index, value, name, results[name], limits, skipped)
            for index, (value, name) in enumerate(zip(final.values, results, strict=True))
        ]
    else:
        skipped["(results)"] = f"the module gives {len(final.values)} tensors, and the session {len(results)}"
    return [layer for layer in layers if layer is not None], skipped


def _are_prompts(inputs: Any) -> bool:
    return (
        isinstance(inputs, (list, tuple))
        and bool(inputs)
        and all(
            isinstance(prompt, str)
            or (isinstance(prompt, (list, tuple)) and bool(prompt) and all(isinstance(token, int) for token in prompt))
            for prompt in inputs
        )
    )


def _prompts_parity(reference: TorchLogprobs, other: Any, prompts: Sequence[Any], limits: Tolerance) -> Parity:
    """Compare what both say about the next tokens of prompts, then the layers of the first prompt that differs."""
    if isinstance(other, torch.nn.Module):
        candidate: LogprobSource = logprobs_of(other)
    elif hasattr(other, "intermediates"):
        candidate = SessionLogprobs(other.run, other.model)
    elif isinstance(other, LogprobSource):
        candidate = other
    else:
        raise InputError(f"parity takes a session, a module or a source of logprobs, got a {type(other).__name__}")
    what = f"<{type(reference.model).__qualname__}>"
    positions, largest, reason = 0, 0.0, ""
    first: tuple[int, int] | None = None
    ids = [token_ids(prompt, reference) for prompt in prompts]
    for number, tokens in enumerate(ids):
        sides = [np.asarray(source.logprobs(tokens)) for source in (reference, candidate)]
        rows = min(map(len, sides))
        want, got = (side[-rows:] for side in sides)
        positions += rows
        if same_bits(want, got):
            continue
        figures = compare_within({"": normalized(want)}, {"": normalized(got)}, limits).outputs[0]
        if figures.reason and (not reason or figures.max_abs > largest):
            reason = figures.reason
        largest = max(largest, figures.max_abs)
        if first is None:
            row = 0
            if want.shape == got.shape:
                row = next(i for i in range(rows) if not same_bits(want[i], got[i].astype(want.dtype)))
            first = number, len(tokens) - rows + row
    logprobs = LogprobParity(len(ids), positions, first is None, largest, first, not reason, reason)
    layers: list[LayerParity] = []
    skipped: dict[str, str] = {}
    if first is not None and not _has_layers(other):
        skipped["(layers)"] = "the other side shows no tensors inside of it"
    elif first is not None:
        tokens = ids[first[0]][: first[1]]
        args: tuple[Any, ...] = (reference.ids(tokens),)
        feeds: Mapping[str, Any] = {}
        if _module_of(other) is None:
            names = [info.name for info in other.model.inputs]
            feeds = candidate.feeds(tokens)  # type: ignore[attr-defined]
            feeds, args, kwargs = feeds_and_call(reference.model, feeds, names, what)
        else:
            cached = "use_cache" in inspect.signature(reference.model.forward).parameters
            kwargs = {"use_cache": False} if cached else {}
        layers, skipped = _layers(reference, other, feeds, args, kwargs, limits)
        if all(layer.max_abs == 0 for layer in layers):
            skipped["(decoding)"] = (
                "in one forward every layer is the same, so the difference comes of the cache, of decoding or of "
                "logits processors"
            )
    return _parity(what, other, limits, layers, skipped, logprobs)


@dataclass
class _Call:
    path: str
    kind: str
    number: int
    values: list[torch.Tensor]


class _Hooks:
    """Keeps the results of every module, in the order in which they finish."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.calls: list[_Call] = []
        self._counts: dict[str, int] = {}

    def watching(self) -> Any:
        stack = contextlib.ExitStack()
        for path, part in self._model.named_modules():
            handle = part.register_forward_hook(lambda m, _, out, path=path: self._keep(path, m, out))
            stack.callback(handle.remove)
        return stack

    def _keep(self, path: str, module: torch.nn.Module, result: Any) -> None:
        from xpuruntime.pytorch._private_api import pytree

        values = [leaf.detach().clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        number = self._counts.get(path, 0)
        self._counts[path] = number + 1
        self.calls.append(_Call(path, type(module).__name__, number, values))


def _pairs(seen: _Hooks, outputs: ModuleOutputs) -> tuple[list[tuple[_Call, int, torch.Tensor, str]], dict[str, str]]:
    """Return every result of a module with the tensor of the session's graph that it is, and what has none."""
    by_path: dict[str, list[_Call]] = {}
    for call in seen.calls:
        if call.path:
            by_path.setdefault(call.path, []).append(call)
    skipped: dict[str, str] = {}
    tensors: dict[tuple[str, int, int], str] = {}
    for path, calls in by_path.items():
        wanted = sum(len(call.values) for call in calls)
        names = outputs.of(path, wanted)
        if not outputs.has(path):
            skipped[path] = "no node of the session's model is of it: it computes nothing, or was folded away"
        elif len(names) != wanted:
            skipped[path] = f"it gave {wanted} tensors, and {len(names)} leave its nodes in the session's model"
        else:
            places = [(path, call.number, index) for call in calls for index in range(len(call.values))]
            tensors.update(zip(places, names, strict=True))
    pairs = [
        (call, index, value, tensors[call.path, call.number, index])
        for call in seen.calls
        for index, value in enumerate(call.values)
        if (call.path, call.number, index) in tensors
    ]
    return pairs, skipped


def _limits(
    model: torch.nn.Module, session: Any, rtol: float | None, atol: float | None, cosine: float | None
) -> Tolerance:
    parts = [part for part in (model, _module_of(session)) if part is not None]
    kinds = {_PRECISION.get(p.dtype, "fp32") for part in parts for p in part.parameters() if p.is_floating_point()} or {
        "fp32"
    }
    if hasattr(session, "plan"):
        kinds.add(session.plan.precision if session.plan.precision in TOLERANCES else "fp32")
    loosest = max((TOLERANCES[kind] for kind in kinds), key=lambda tolerance: tolerance.rtol)
    limits = {"rtol": rtol, "atol": atol, "cosine": cosine}
    for name, value in limits.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < math.inf):
            raise InputError(f"parity: {name} is {value!r}. Fix: pass a number from 0, or leave it out")
    stated = {name: float(value) for name, value in limits.items() if value is not None}
    return msgspec.structs.replace(loosest, **stated, cosine_stated=cosine is not None)


def _layer(
    call: _Call,
    index: int,
    want: torch.Tensor,
    tensor: str,
    got: Any,
    limits: Tolerance,
    skipped: dict[str, str],
) -> LayerParity | None:
    other = torch.as_tensor(got).detach().cpu()
    want = want.cpu()
    if other.numel() != want.numel() or other.shape != want.shape:
        name = call.path or "(results)"
        skipped[name] = f"it gives {list(want.shape)}, and {tensor!r} is {list(other.shape)} in the session's model"
        return None
    figures = _figures(want, other, limits)
    figures_of_layer = (
        figures.max_abs,
        figures.max_rel,
        figures.cosine,
        figures.passed,
        figures.reason,
        figures.undecided,
    )
    return LayerParity(call.path, call.kind, call.number, index, tensor, tuple(want.shape), *figures_of_layer)


def _figures(want: torch.Tensor, got: torch.Tensor, limits: Tolerance) -> OutputFigures:
    if want.is_floating_point():
        want, got = want.double(), got.double()
    else:
        got = got.to(want.dtype)
    return compare_within({"": want.numpy()}, {"": got.numpy()}, limits).outputs[0]
