# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Row` and `Coverage`: the result of `explain` for one kind of calls, and for all."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["Coverage", "Row", "RowStatus"]

RowStatus = Literal["honoured", "substituted", "default", "bypassed", "opaque", "other"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one operator, from one module, on tensors of the same shapes and types, in one phase.

    Outside of training, lengths that grow from token to token or from prompt to prompt count as the same within a range
    from above one power of two up to the next.

    Attributes
    ----------
    op : str
        Operation of a `KernelPolicy`, such as ``"matmul"``; empty for what no policy can speak of.
    operator : str
        PyTorch's operator, such as ``"aten::addmm"``; of what ran without one, the kernel, ``"CUDA graph"`` or
        ``"torch.compile"``.
    module : str
        Path of the module in whose forward it ran, or whose backward it is; empty where it is not known.
    phase : str
        ``"train"``, ``"infer"``, ``"prefill"``, ``"decode"`` or ``"backward"``; empty where it is not known.
    shapes : tuple of tuple of int
        Of the tensors that it was called with; of the first call, where lengths fall into one range.
    dtypes : tuple of str
        Of these, each once.
    device : str
        Such as ``"cuda:0"``; empty where it is not known.
    requested : tuple of str
        What the policy asks for, in order; empty where it asks for nothing.
    source : str
        The key that asks, such as ``"kernels.rules[0]"``; ``"default"`` where nothing does.
    resolved : str
        The kernel that this became, ``kernel@config`` where the core settled a configuration; empty where nobody
        chose.
    observed : tuple of str
        Kernels that ran, the longest first: on CUDA those of the device, as the profiler saw them; on the CPU operators
        of PyTorch's, or the xpuruntime kernel that served the calls.
    status : {"honoured", "substituted", "default", "bypassed", "opaque", "other"}
        Under a rule, and as it asks, or by another kernel. ``"default"``: no policy asks for anything. ``"bypassed"``:
        a policy speaks of this operation, but the calls bypassed it. ``"opaque"``: it cannot be seen what ran, as in
        the replay of a CUDA graph. ``"other"``: no policy can speak of it.
    reason : str
        Why it is not ``"honoured"``, and what else one should know.
    count : int
        Calls; of ``"other"`` and of kernels without operator on a device, kernels.
    time_us : float
        All of them together, in microseconds of `Explanation.time_kind`.
    kv : str
        Of an attention outside of training, the range of the lengths of its keys and values, such as ``"33..64"``, as
        rules take it.
    """

    op: str
    operator: str
    module: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    device: str
    requested: tuple[str, ...]
    source: str
    resolved: str
    observed: tuple[str, ...]
    status: RowStatus
    reason: str
    count: int
    time_us: float
    kv: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @property
    def title(self) -> str:
        """The calls in a few words: operator, shapes, module, phase."""
        shapes = " x ".join(str(list(shape)) for shape in self.shapes)
        where = f"in {self.module}" if self.module else ""
        return " ".join(filter(None, (self.operator, shapes, ",".join(self.dtypes), where, self.phase)))


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the time, each from 0 to 1; together they are 1, or 0 where nothing was timed.

    Attributes
    ----------
    honoured, substituted : float
        Under a rule, by the kernel that it asks for, or by another.
    default : float
        Operations that a policy could speak of, and none does.
    bypassed : float
        Operations that a policy speaks of, and that bypassed it.
    opaque : float
        It cannot be seen which operations these were.
    other : float
        Operations that no policy can speak of.
    """

    honoured: float
    substituted: float
    default: float
    bypassed: float
    opaque: float
    other: float

    @property
    def rule(self) -> float:
        """Share of the time that ran under a rule, `honoured` and `substituted`."""
        return self.honoured + self.substituted

    @property
    def covered(self) -> float:
        """Of the time in which a policy could have had a say, the share that ran as one asks; 0 where there is none."""
        reach = self.rule + self.default + self.bypassed + self.opaque
        return self.honoured / reach if reach else 0.0

    @classmethod
    def of(cls, rows: tuple[Row, ...]) -> Coverage:
        """Return the shares of some rows."""
        total = sum(row.time_us for row in rows)
        shares = dict.fromkeys(cls.__struct_fields__, 0.0)
        for row in rows:
            shares[row.status] += row.time_us / total if total else 0.0
        return cls(**shares)
