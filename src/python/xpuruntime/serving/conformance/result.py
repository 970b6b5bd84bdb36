# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What is checked of a server: probe inputs, the comparison of answers, and what came of each check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from xpuruntime.evidence.documents import Document
from xpuruntime.evidence.tolerances import REPEATED, Tolerance, compare_within
from xpuruntime.serving.messages import InferTensor
from xpuruntime.serving.protocol.datatypes import DATATYPES

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.serving.messages import InferResponse

Outcome = Literal["pass", "fail", "unobservable"]

#: Checks of inference in which a model answered; in the others it refused.
_ANSWERED = ("JSON", "binary tensors", "raw contents", "typed contents")
#: After so many answers in a row that did not come in time, no more are waited for.
_MOST_LATE = 3


class FailedCheck(Exception):  # noqa: N818 - an outcome, and no error of ours
    """The server does something else than the protocol says."""


class UnobservableCheck(Exception):  # noqa: N818 - an outcome, and no error of ours
    """It could not be seen from outside."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check."""

    transport: str
    name: str
    outcome: Outcome
    detail: str = ""


class ConformanceResult(Document, frozen=True, kw_only=True):
    """What was checked of one server."""

    schema: str = "xpuruntime.oip-check/1"
    url: str
    grpc: str
    server: str
    models: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.outcome == "fail")

    @property
    def exit_code(self) -> int:
        """1 where a check failed, 4 where inference could not be checked, else 0."""
        if self.failed:
            return 1
        answered = (check for check in self.checks if check.outcome == "pass" and check.name.startswith("infer "))
        return 0 if any(output.name.rpartition(": ")[2] in _ANSWERED for output in answered) else 4

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.tables import table

        title = f"{self.server or 'server'} at {self.url or self.grpc}"
        shown = table(title, ("transport", "check", "outcome", "detail"))
        styles = {"pass": "green", "fail": "bold red", "unobservable": "yellow"}
        for check in self.checks:
            outcome = Text(check.outcome, style=styles[check.outcome])
            shown.add_row(check.transport, check.name, outcome, Text(check.detail))
        counted = {word: sum(check.outcome == word for check in self.checks) for word in styles}
        passed, failed, unseen = counted.values()
        return Group(shown, Text(f"{passed} passed, {failed} failed, {unseen} unobservable"))


class Checker:
    """Runs checks of one transport, and keeps what came of them."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.checks: list[Check] = []
        self._late = 0

    def run(self, name: str, check: Callable[[], str | None]) -> bool:
        """Run a check, which returns what it saw or raises; return whether it passed."""
        outcome: Outcome = "pass"
        late, self._late = self._late, 0
        try:
            if late == _MOST_LATE:
                self._late = late
                raise UnobservableCheck(f"not asked: {late} answers in a row did not come in time")
            detail = check() or ""
        except FailedCheck as error:
            outcome, detail = "fail", str(error)
        except UnobservableCheck as error:
            outcome, detail = "unobservable", str(error)
        except TimeoutError:
            outcome, detail, self._late = "fail", "no answer came in time", late + 1
        except Exception as error:  # whatever a server answers is no error of the client
            outcome, detail = "fail", f"{type(error).__name__}: {error}"
        self._keep(name, outcome, detail)
        return outcome == "pass"

    def not_seen(self, name: str, reason: str) -> None:
        """Keep what could not be checked, and why."""
        self._keep(name, "unobservable", reason)

    def fail(self, name: str, detail: str) -> None:
        """Keep a check that failed."""
        self._keep(name, "fail", detail)

    def _keep(self, name: str, outcome: Outcome, detail: str) -> None:
        self.checks.append(Check(transport=self.transport, name=name[:300], outcome=outcome, detail=detail[:500]))


_MOST = 1 << 24


def probe_inputs(metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> list[InferTensor]:
    """Return inputs of a model: 0.5 and 0, and empty strings, with free dimensions of size 1 unless stated."""
    inputs, total = [], 0
    for input_ in metadata.get("inputs", ()):
        name, datatype = input_["name"], DATATYPES.get(input_["datatype"])
        if datatype is None:
            raise FailedCheck(
                f"input {name!r} has the datatype {input_['datatype']!r}, which the protocol does not have"
            )
        dims = [int(dim) for dim in input_.get("shape", ())]
        shape = tuple(shapes.get(name) or (1 if dim < 0 else dim for dim in dims))
        total += math.prod(shape)
        if total > _MOST or len(shape) > 32:
            raise UnobservableCheck(f"with input {name!r} of the shape {list(shape)}, a probe would be too large")
        if datatype.is_bytes:
            array = np.full(shape, b"", object)
        elif datatype.name == "BF16":
            array = np.full(shape, 0x3F00, datatype.dtype)
        else:
            array = np.full(shape, 0.5 if datatype.dtype.kind == "f" else 0, datatype.dtype)
        inputs.append(InferTensor(name, datatype.name, shape, array))
    return inputs


def check_outputs(response: InferResponse, metadata: Mapping[str, Any], model: str) -> None:
    """Raise FailedCheck where a response is not of the model that the metadata describe."""
    if response.model != model:
        raise FailedCheck(f"model_name is {response.model!r}, and {model!r} was asked")
    stated = {output["name"]: output for output in metadata.get("outputs", ())}
    if not response.outputs:
        raise FailedCheck("there are no outputs")
    for output in response.outputs:
        facts = stated.get(output.name)
        if facts is None:
            raise FailedCheck(f"output {output.name!r} is not in the metadata")
        if facts["datatype"] != output.datatype:
            raise FailedCheck(f"output {output.name!r} is {output.datatype}, and {facts['datatype']} in the metadata")
        dims = [int(dim) for dim in facts.get("shape", ())]
        if len(dims) != len(output.shape) or any(
            dim not in (size, -1) for dim, size in zip(dims, output.shape, strict=True)
        ):
            raise FailedCheck(f"output {output.name!r} has the shape {list(output.shape)}, and {dims} in the metadata")


def need_same(response: InferResponse, other: InferResponse, what: str) -> None:
    """Raise FailedCheck where two answers to the same request differ."""
    first, second = ({tensor.name: tensor for tensor in answer.outputs} for answer in (response, other))
    if first.keys() != second.keys():
        raise FailedCheck(f"{what} has the outputs {sorted(second)}, not {sorted(first)}")
    for name, tensor in first.items():
        again = second[name]
        if (tensor.shape, tensor.datatype) != (again.shape, again.datatype):
            raise FailedCheck(f"{what} has {name!r} as {again.datatype} {again.shape}")
        limits = REPEATED if tensor.data.dtype.kind == "f" else Tolerance(rtol=0.0, atol=0.0, cosine=0.0)
        (figures,) = compare_within({name: tensor.data}, {name: again.data}, limits).outputs
        if not figures.passed:
            raise FailedCheck(f"{what} has other values of {name!r}: {figures.reason}")
