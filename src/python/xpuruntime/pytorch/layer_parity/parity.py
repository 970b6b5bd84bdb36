# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`parity`: a module compared with the session that serves it, layer by layer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from xpuruntime.errors import InputError, ModelError
from xpuruntime.evidence.tolerances import TOLERANCES, compare_within
from xpuruntime.printable import printable
from xpuruntime.pytorch.layer_parity.module_outputs import ModuleOutputs, feeds_and_call, for_session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.evidence.tolerances import OutputFigures, Tolerance

__all__ = ["LayerParity", "Parity", "parity"]

SCHEMA = "xpuruntime.parity/1"
_PRECISION = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Session(Protocol):
    """What is needed of a session; `InferenceSession` is one."""

    @property
    def model(self) -> Any: ...
    @property
    def plan(self) -> Any: ...
    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]: ...
    def intermediates(self, inputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class LayerParity:
    """One result of one module, in the module itself and in the session.

    Attributes
    ----------
    module : str
        Path; empty for the results of the whole model.
    kind : str
        Class of the module.
    call, output : int
        Which call of the module, and which tensor of its result.
    tensor : str
        Name of the tensor in the session's model.
    shape : tuple of int
    max_abs : float
        Largest difference; of integers and booleans the number of elements that differ.
    max_rel : float
        `max_abs` over the largest magnitude of the module's result; of integers and booleans the share that differs.
    cosine : float or None
        ``None`` where it is not defined: of integers and booleans, and where either side has no value but zero.
    passed : bool
    reason : str
        Why it did not pass; empty where it did.
    undecided : str
        Why the limits do not tell a right result from a wrong result here, although it passed.
    """

    module: str
    kind: str
    call: int
    output: int
    tensor: str
    shape: tuple[int, ...]
    max_abs: float
    max_rel: float
    cosine: float | None
    passed: bool
    reason: str = ""
    undecided: str = ""

    @property
    def name(self) -> str:
        """The module with the number of the call and of the result, where there are several."""
        path = self.module or "(results)"
        return path + (f" call {self.call}" if self.call else "") + (f" [{self.output}]" if self.output else "")


@dataclass(frozen=True)
class Parity:
    """How far a session drifts from a module, layer by layer.

    Attributes
    ----------
    model, session : str
    rtol, atol, cosine : float
    layers : tuple of LayerParity
        In the order in which the modules finished; the results of the whole model last.
    skipped : dict of str to str
        Modules that could not be compared, each with the reason.
    """

    model: str
    session: str
    rtol: float
    atol: float
    cosine: float
    layers: tuple[LayerParity, ...]
    skipped: dict[str, str]
    schema: str = SCHEMA

    @property
    def agreed(self) -> bool:
        """Whether every layer that was compared is within tolerance, and a result of the model was judged."""
        return all(layer.passed for layer in self.layers) and any(
            not layer.module and not layer.undecided for layer in self.layers
        )

    @property
    def first_diverging(self) -> LayerParity | None:
        """The first layer out of tolerance in the order of execution, inner ones before those around them."""
        return next((layer for layer in self.layers if not layer.passed), None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        plain = asdict(self)
        first = self.first_diverging
        plain["layers"] = [{**asdict(layer), "shape": list(layer.shape)} for layer in self.layers]
        return {
            "schema": plain.pop("schema"),
            "agreed": self.agreed,
            "first_diverging": None if first is None else first.module,
            **plain,
        }

    def __str__(self) -> str:
        """Return it as a table in plain text, one layer a line."""
        rows = [("layer", "kind", "max abs", "max rel", "cosine", ""), *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            self._compared(),
            self._verdict(),
            *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        ]
        return printable("\n".join([*lines, *self._missing()]))

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import Badge, fragment, fragment_lines, fragment_table

        rows = [(*row[:-1], Badge(row[-1] or "agrees")) for row in self._rows()]
        columns = ("layer", "kind", ">max abs", ">max rel", ">cosine", "verdict")
        table = fragment_table(self._compared(), columns, rows)
        return fragment((fragment_lines([self._verdict()]), table, fragment_lines(self._missing())))

    def _compared(self) -> str:
        return f"{self.model} against {self.session} (rtol {self.rtol:g}, atol {self.atol:g}, cosine {self.cosine:g})"

    def _verdict(self) -> str:
        first = self.first_diverging
        if first is not None:
            return f"first diverging layer: {first.name} ({first.kind}): {first.reason}"
        idle = sum(bool(layer.undecided) for layer in self.layers)
        agree = f"{len(self.layers) - idle} results of modules agree"
        return f"{agree}, {idle} cannot be judged on these inputs" if idle else agree

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                o.name,
                o.kind,
                f"{o.max_abs:.3g}",
                f"{o.max_rel:.3g}",
                "-" if o.cosine is None else f"{o.cosine:.6f}",
                "inconclusive" if o.undecided else "" if o.passed else "differs",
            )
            for o in self.layers
        ]

    def _missing(self) -> list[str]:
        return [f"not compared: {name}: {reason}" for name, reason in self.skipped.items()]


def parity(
    model: torch.nn.Module,
    session: Session,
    inputs: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    cosine: float | None = None,
) -> Parity:
    """Run a module and the session that serves it on the same inputs, and compare them module by module.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode; it runs as the caller has set it up, kernel policies included.
    session : InferenceSession
        Of the same model: of the file that `export` wrote, or of the module itself.
    inputs : tensor, sequence, or mapping of str to tensor
        What `model` is called with, as `export` takes it: by position, or by the names of ``forward``'s parameters or
        of the session's inputs.
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
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"parity takes a torch.nn.Module, got a {type(model).__name__}")
    if not hasattr(session, "intermediates"):
        raise InputError(f"parity takes an InferenceSession, got a {type(session).__name__}: open one of the model")
    what = f"<{type(model).__qualname__}>"
    training = next((name for name, part in model.named_modules() if part.training), None)
    if training is not None:
        raise ModelError(f"{what} is in training mode: its results are random or change it. Fix: call model.eval()")
    names = [info.name for info in session.model.inputs]
    feeds, args, kwargs = feeds_and_call(model, inputs, names, what)
    seen = _Hooks(model)
    with seen.watching(), torch.no_grad():
        model(*args, **kwargs)
    arrays = {name: for_session(value, session) for name, value in feeds.items()}
    outputs = ModuleOutputs(session.model)
    pairs, skipped = _pairs(seen, outputs)
    wanted = dict.fromkeys(tensor for *_, tensor in pairs)
    got = dict(session.intermediates(arrays, list(wanted)))
    results = dict(session.run(arrays))
    limits = _limits(model, session, rtol, atol, cosine)
    layers = []
    for call, index, value, tensor in pairs:
        if tensor not in got:
            skipped[call.path] = f"the session made no tensor {tensor!r}: control flow depends on the inputs"
            continue
        layers.append(_layer(call, index, value, tensor, got[tensor], limits, skipped))
    final = seen.calls[-1]
    if len(final.values) == len(results):
        layers += [
            _layer(final, index, value, name, results[name], limits, skipped)
            for index, (value, name) in enumerate(zip(final.values, results, strict=True))
        ]
    else:
        skipped["(results)"] = f"the module gives {len(final.values)} tensors, and the session {len(results)}"
    plan = session.plan
    return Parity(
        model=what,
        session=f"{session.model.path} on {plan.engine}@{plan.device}",
        rtol=limits.rtol,
        atol=limits.atol,
        cosine=limits.cosine,
        layers=tuple(layer for layer in layers if layer is not None),
        skipped=skipped,
    )


@dataclass
class _Call:
    """One call of a module that has finished."""

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
        import contextlib

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
        found = outputs.of(path, wanted)
        if not outputs.has(path):
            skipped[path] = "no node of the session's model is of it: it computes nothing, or was folded away"
        elif len(found) != wanted:
            skipped[path] = f"it gave {wanted} tensors, and {len(found)} leave its nodes in the session's model"
        else:
            places = [(path, call.number, index) for call in calls for index in range(len(call.values))]
            tensors.update(zip(places, found, strict=True))
    pairs = [
        (call, index, value, tensors[call.path, call.number, index])
        for call in seen.calls
        for index, value in enumerate(call.values)
        if (call.path, call.number, index) in tensors
    ]
    return pairs, skipped


def _limits(
    model: torch.nn.Module, session: Session, rtol: float | None, atol: float | None, cosine: float | None
) -> Tolerance:
    kinds = {_PRECISION.get(p.dtype, "fp32") for p in model.parameters() if p.is_floating_point()}
    kinds.add(session.plan.precision if session.plan.precision in TOLERANCES else "fp32")
    loosest = max((TOLERANCES[kind] for kind in kinds), key=lambda one: one.rtol)
    given = {"rtol": rtol, "atol": atol, "cosine": cosine}
    for name, value in given.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < math.inf):
            raise InputError(f"parity: {name} is {value!r}; pass a number from 0, or leave it out")
    stated = {name: float(value) for name, value in given.items() if value is not None}
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
    found = (figures.max_abs, figures.max_rel, figures.cosine, figures.passed, figures.reason, figures.undecided)
    return LayerParity(call.path, call.kind, call.number, index, tensor, tuple(want.shape), *found)


def _figures(want: torch.Tensor, got: torch.Tensor, limits: Tolerance) -> OutputFigures:
    if want.is_floating_point():
        want, got = want.double(), got.double()
    else:
        got = got.to(want.dtype)
    return compare_within({"": want.numpy()}, {"": got.numpy()}, limits).outputs[0]
