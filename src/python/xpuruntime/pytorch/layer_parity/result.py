# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `parity` returns: how far layers, and next tokens, of two models are apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from xpuruntime.notebook import one_line
from xpuruntime.printable import printable

SCHEMA = "xpuruntime.parity/1"


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
class LogprobParity:
    """How far what two models say about next tokens is apart.

    Attributes
    ----------
    prompts, positions : int
        How many prompts, and next tokens in them, were compared.
    bits : bool
        Whether all of it is the same, bit for bit.
    max_abs : float
        Largest difference of two logprobs, in nats.
    first : tuple of int or None
        Prompt and token at which the first bits differ.
    passed : bool
    reason : str
        Why it did not pass; empty where it did.
    """

    prompts: int
    positions: int
    bits: bool
    max_abs: float
    first: tuple[int, int] | None
    passed: bool
    reason: str = ""

    def __str__(self) -> str:
        said = f"{self.positions} next tokens of {self.prompts} prompts: "
        if self.bits:
            return said + "the same bits"
        where = "" if self.first is None else f", first in token {self.first[1]} of prompt {self.first[0]}"
        said += f"logprobs differ by at most {self.max_abs:.3g}{where}"
        return said if self.passed else f"{said}: {self.reason}"


@dataclass(frozen=True)
class Parity:
    """How far a session, or another module, drifts from a module, layer by layer.

    Attributes
    ----------
    model, session : str
    rtol, atol, cosine : float
    layers : tuple of LayerParity
        In the order in which the modules finished; the results of the whole model last.
    skipped : dict of str to str
        Modules that could not be compared, each with the reason.
    logprobs : LogprobParity or None
        Where prompts were compared. Layers are then those of the first prompt that differs, up to the token that does.
    """

    model: str
    session: str
    rtol: float
    atol: float
    cosine: float
    layers: tuple[LayerParity, ...]
    skipped: dict[str, str]
    schema: str = SCHEMA
    logprobs: LogprobParity | None = None

    @property
    def agreed(self) -> bool:
        """Whether every layer that was compared is within tolerance, and a result of the model was judged.

        Of prompts: whether their logprobs are within tolerance.
        """
        if self.logprobs is not None:
            return self.logprobs.passed
        return all(layer.passed for layer in self.layers) and any(
            not layer.module and not layer.undecided for layer in self.layers
        )

    @property
    def first_diverging(self) -> LayerParity | None:
        """The first layer out of tolerance in the order of execution, inner ones before those around them."""
        return next((layer for layer in self.layers if not layer.passed), None)

    @property
    def first_different(self) -> LayerParity | None:
        """The first layer that differs at all, within tolerance or not, in the order of execution."""
        return next((layer for layer in self.layers if layer.max_abs > 0 or not layer.passed), None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        plain = asdict(self)
        first = self.first_diverging
        if self.logprobs is None:
            del plain["logprobs"]
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
            *self._verdicts(),
            *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        ]
        return printable("\n".join([*lines, *self._missing()]))

    __repr__ = one_line

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import Badge, fragment, fragment_lines, fragment_table

        rows = [(*row[:-1], Badge(row[-1] or "agrees")) for row in self._rows()]
        columns = ("layer", "kind", ">max abs", ">max rel", ">cosine", "verdict")
        table = fragment_table(self._compared(), columns, rows)
        return fragment((fragment_lines(self._verdicts()), table, fragment_lines(self._missing())))

    def _compared(self) -> str:
        return f"{self.model} against {self.session} (rtol {self.rtol:g}, atol {self.atol:g}, cosine {self.cosine:g})"

    def _verdicts(self) -> list[str]:
        if self.logprobs is None:
            return [self._verdict()]
        slight = self.first_different
        said = [] if not self.layers else [self._verdict()]
        if slight is not None and slight is not self.first_diverging:
            said.append(f"first layer that differs at all: {slight.name} ({slight.kind}), by {slight.max_abs:.3g}")
        return [str(self.logprobs), *said]

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
