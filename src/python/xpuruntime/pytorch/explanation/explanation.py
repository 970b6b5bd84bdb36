# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Explanation`: the result of `explain`."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.files.paths import json_text
from xpuruntime.notebook import rich_fragment
from xpuruntime.pytorch.explanation.summary import Coverage, Row
from xpuruntime.pytorch.switches.policy_switches import Setting
from xpuruntime.pytorch.weights import LinearWeights, WeightTraffic
from xpuruntime.shown import Shown

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "xpuruntime.explanation/1"
#: Rows that the message of `Explanation.require` names.
_NAMED = 8
_NO_POLICY = "no policy was active in the block"


class ExplanationData(msgspec.Struct, frozen=True, kw_only=True):
    """All that an `Explanation` has, once it has it."""

    rows: tuple[Row, ...]
    time_kind: Literal["device", "cpu"]
    overhead_us: float
    policy: dict[str, Any] | None
    notes: tuple[str, ...]
    partial: bool
    unmatched: tuple[str, ...] = ()
    never_ran: tuple[str, ...] = ()
    model: str = ""
    generation: dict[str, dict[str, Any]] = {}
    settings: tuple[Setting, ...] = ()
    switches: tuple[str, ...] = ()
    weights: tuple[LinearWeights, ...] = ()
    weight_deviations: tuple[str, ...] = ()
    weight_traffic: WeightTraffic | None = None
    fast_path: str = ""


class Explanation(Shown):
    """Which kernels the code inside an `explain` block ran, who asked for them, how often, and how long.

    It has everything after the block; before that, each attribute raises `InputError`. ``str(found)`` is a table.

    Attributes
    ----------
    rows : tuple of Row
        The longest first.
    coverage : Coverage
    time_kind : {"device", "cpu"}
        What the times are: those of kernels, copies and fills on CUDA devices, or, where none ran there, of the CPU.
    total_us : float
        All times together, in microseconds.
    overhead_us : float
        CPU time between the entry of operators and their kernels, for choosing and for watching; in none of the rows.
    policy : dict or None
        The policy that held when the block was entered.
    notes : tuple of str
        What could not be seen, and why; rules that matched no call.
    unmatched : tuple of str
        Rules for modules that matched no call, of policies that held inside; also among the notes.
    never_ran : tuple of str
        Operations of which a policy names a kernel, and of which no call was seen; also among the notes. Where some may
        have run inside of what is ``"opaque"``, the sentence begins with ``"inconclusive"``.
    model : str
        Class of the root, the number of its parameters, and a digest of their names and shapes; empty without one.
    generation : dict of str to dict
        Class of each model of transformers that generated to what its tokens depend on beside kernels: attention and
        experts implementation, cache, and what its configuration states of the generation, without lengths. A list
        where there were several.
    settings : tuple of Setting
        What ``execution`` of the policy states of precision and determinism, as PyTorch's switches read back when the
        block began and ended.
    switches : tuple of str
        What transformers replaced, dropped or skipped by itself; also among the notes.
    weights : tuple of LinearWeights
        Of each linear layer of `root`: type of the stored values after the block, and of the products that ran.
    weight_deviations : tuple of str
        Where they are not as ``execution.weights`` of the policy claims; also among the notes. The sentence begins with
        ``"inconclusive"`` where no product of a layer was seen.
    weight_traffic : WeightTraffic or None
        Whether layers took less time than reading bf16 weights takes; ``None`` where ``execution.weights`` claims
        nothing, or `root` was not given.
    partial : bool
        Whether the block was left by an exception.
    fast_path : str
        The route by which PyTorch's dispatcher reaches a policy in this process: ``"addon"``, ``"stable"`` or
        ``"python"``. Results are the same on each, and calls cost more on the latter two.
    """

    def __init__(self) -> None:
        self._found: ExplanationData | None = None
        self._locked = ("", "")

    def finish(self, explanation_data: ExplanationData, locked: tuple[str, str] = ("", "")) -> None:
        """Take what was found, and a lock that held with its model; called once, by `explain`."""
        self._found, self._locked = explanation_data, locked

    def _get(self) -> ExplanationData:
        if self._found is None:
            msg = "nothing is explained yet: use what explain() gives after its with block"
            raise InputError(msg)
        return self._found

    @property
    def rows(self) -> tuple[Row, ...]:
        """One for each kind of calls, the longest first."""
        return self._get().rows

    @property
    def time_kind(self) -> Literal["device", "cpu"]:
        """Whether times are those of devices or of the CPU."""
        return self._get().time_kind

    @property
    def overhead_us(self) -> float:
        """CPU time between the entry of operators and their kernels, in microseconds."""
        return self._get().overhead_us

    @property
    def policy(self) -> dict[str, Any] | None:
        """The policy that held when the block was entered."""
        return self._get().policy

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be seen, and why."""
        return self._get().notes

    @property
    def unmatched(self) -> tuple[str, ...]:
        """Rules for modules that matched no call."""
        return self._get().unmatched

    @property
    def never_ran(self) -> tuple[str, ...]:
        """Operations of which a policy names a kernel, and of which no call was seen."""
        return self._get().never_ran

    @property
    def model(self) -> str:
        """Class of the root with the number and a digest of its parameters."""
        return self._get().model

    @property
    def generation(self) -> dict[str, dict[str, Any]]:
        """Class of each model of transformers that generated to what its tokens depend on beside kernels."""
        return self._get().generation

    @property
    def settings(self) -> tuple[Setting, ...]:
        """What the policy states of precision and determinism, as PyTorch's switches read back."""
        return self._get().settings

    @property
    def switches(self) -> tuple[str, ...]:
        """What transformers replaced, dropped or skipped by itself."""
        return self._get().switches

    @property
    def weights(self) -> tuple[LinearWeights, ...]:
        """How each linear layer of the root stores its weights, and in which type it computed."""
        return self._get().weights

    @property
    def weight_deviations(self) -> tuple[str, ...]:
        """Where weights are not as the policy claims."""
        return self._get().weight_deviations

    @property
    def weight_traffic(self) -> WeightTraffic | None:
        """Whether layers took less time than reading bf16 weights takes."""
        return self._get().weight_traffic

    @property
    def partial(self) -> bool:
        """Whether the block was left by an exception."""
        return self._get().partial

    @property
    def fast_path(self) -> str:
        """The route by which PyTorch's dispatcher reaches a policy in this process."""
        return self._get().fast_path

    @property
    def total_us(self) -> float:
        """All times together, in microseconds."""
        return sum(row.time_us for row in self.rows)

    @property
    def coverage(self) -> Coverage:
        """How much of the time ran under a rule, by default, or bypassed."""
        return Coverage.of(self.rows)

    def __repr__(self) -> str:
        if self._found is None:
            return "Explanation(nothing yet)"
        return f"Explanation({len(self.rows)} rows, {self.total_us:.0f} us of {self.time_kind} time)"

    def __str__(self) -> str:
        from xpuruntime.pytorch.explanation.text_table import plain_text

        return repr(self) if self._found is None else plain_text(self)

    def __rich__(self) -> RenderableType:
        from xpuruntime.pytorch.explanation.text_table import render

        return repr(self) if self._found is None else render(self)

    def _repr_html_(self) -> str:
        from xpuruntime.pytorch.explanation.text_table import render

        return rich_fragment(repr(self) if self._found is None else render(self, defaults=True))

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, and scalars."""
        plain: dict[str, Any] = msgspec.to_builtins(self._get())
        coverage = self.coverage
        return {
            "schema": SCHEMA,
            "total_us": self.total_us,
            "coverage": {**msgspec.to_builtins(coverage), "covered": coverage.covered},
            **plain,
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return JSON text; `indent` ``None`` gives one line."""
        return json_text(self.to_dict(), indent=indent)

    def require(
        self,
        *,
        coverage: float | None = None,
        no_bypass: bool = True,
        no_substitution: bool = True,
        no_unmatched: bool = True,
    ) -> Explanation:
        """Raise unless the code ran under its policy: for a test that is to hold a training to it.

        Parameters
        ----------
        coverage : float, optional
            Least share, from 0 to 1, of the time in which a policy can have a say that has to have run as one asks:
            `Coverage.covered`. Time in other operations does not count.
        no_bypass : bool
            Nothing that the policy speaks of may have escaped it. An ``"opaque"`` call has not escaped, but counts
            against `coverage`.
        no_substitution : bool
            Nothing may have run by another kernel than its rule asks for, the switches of PyTorch have to be as the
            policy states, transformers may have replaced, dropped or skipped nothing of a generation by itself, and
            weights have to be as the policy claims.
        no_unmatched : bool
            No rule for a module may have matched no call, and of no operation that the policy names a kernel for may
            there have been none, or none that could be seen.

        Returns
        -------
        Explanation
            This.

        Raises
        ------
        UnsupportedOperationError
            Names the rows that are against it, the longest first; or no policy was active, or a lock of another model.
        InputError
            `coverage` is not from 0 to 1.
        """
        if coverage is not None and not (isinstance(coverage, (int, float)) and 0 <= coverage <= 1):
            msg = f"coverage is {coverage!r}: give a share from 0 to 1, such as 0.9"
            raise InputError(msg)
        wrong: list[str] = []
        against: set[str] = set()
        if other := other_model(*self._locked, self.model):
            wrong.append(other)
        counts = {status: [row for row in self.rows if row.status == status] for status in ("bypassed", "substituted")}
        if no_bypass and counts["bypassed"]:
            wrong.append(f"{_rows(len(counts['bypassed']))} bypassed the policy")
            against.add("bypassed")
        if no_substitution and counts["substituted"]:
            wrong.append(f"{_rows(len(counts['substituted']))} ran by another kernel than was asked for")
            against.add("substituted")
        if no_substitution:
            wrong += [*self.switches, *self.weight_deviations]
            wrong += [str(setting) for setting in self.settings if setting.status == "substituted"]
        if no_unmatched:
            wrong += [*self.unmatched, *self.never_ran]
        if self.policy is None and coverage is None and all(row.status in ("default", "other") for row in self.rows):
            wrong.append(_NO_POLICY)
        covered = self.coverage.covered
        if coverage is not None and covered < coverage:
            wrong.append(
                f"{covered:.1%} of the {self.time_kind} time that a policy can affect ran as it asks, and "
                f"{coverage:.1%} is required"
            )
            against |= {"default", "bypassed", "substituted", "opaque"}
        if not wrong:
            return self
        rows = [row for row in self.rows if row.status in against]
        lines = [f"  {row.status}: {row.title}: {row.time_us:.1f} us, {_why(row)}" for row in rows[:_NAMED]]
        if len(rows) > _NAMED:
            lines.append(f"  and {len(rows) - _NAMED} more")
        fix = "Fix: add rules for these calls, or require less"
        if no_unmatched and wrong == [*self.unmatched, *self.never_ran]:
            fix = "Fix: delete these keys of the policy, or call require(no_unmatched=False)"
        if other:
            fix = "Fix: run the model of the lock, or make a lock of this one with xpuruntime.pytorch.lock"
        elif wrong == [_NO_POLICY]:
            fix = "Fix: enter one around it, with kernel_policy(...)"
        elif no_substitution and not rows and any(setting.status == "substituted" for setting in self.settings):
            fix = "Fix: leave PyTorch's switches to the policy inside of the block"
        raise UnsupportedOperationError("\n".join(["; ".join(wrong) + ". " + fix, *lines]), engine="torch")


def model_text(root: torch.nn.Module | None) -> str:
    """Return the class of a model, the number of its parameters, and a digest of their names and shapes."""
    if root is None:
        return ""
    while isinstance(inner := getattr(root, "_orig_mod", getattr(root, "module", None)), torch.nn.Module) and (
        len(list(root.children())) == 1
    ):  # compiled, or wrapped for several ranks
        root = inner
    shapes = sorted((name, list(parameter.shape)) for name, parameter in root.named_parameters())
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
    return f"{type(root).__name__} with {sum(map(torch.Tensor.numel, root.parameters())):,} parameters ({digest})"


def other_model(where: str, locked: str, ran: str) -> str:
    """Return in a sentence that a lock is of another model than ran; empty where it is not, or that is not known."""
    return (
        f"the lock {where} does not hold: it is of {locked}, and {ran} ran" if locked and ran and locked != ran else ""
    )


def _rows(count: int) -> str:
    return "calls of 1 kind" if count == 1 else f"calls of {count} kinds"


def _why(row: Row) -> str:
    ran = row.resolved or ", ".join(row.observed[:1]) or "an unknown kernel"
    return f"by {ran}" + (f" ({row.reason})" if row.reason else "")
