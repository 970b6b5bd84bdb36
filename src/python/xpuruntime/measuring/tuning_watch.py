# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`watch_tuning`: progress of kernel tuning in this process, with a way to end it and a budget for all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

from xpuruntime import _core
from xpuruntime.argument_types import CALLABLE, NUMBER, check_types
from xpuruntime.errors import InputError, warn


class TuningProgress(NamedTuple):
    """Where the tuning of one operation stands.

    Attributes
    ----------
    tuner : {"core", "onnxruntime", "torch"}
        Who measures.
    operation : str
        What is measured.
    candidates : int
        Kernels that are still compared.
    rounds, most_rounds : int
        Rounds that were run, and the most; both 0 before the candidates are prepared.
    seconds, total : float
        That this operation took so far, and that all of them took in the block.
    """

    tuner: str
    operation: str
    candidates: int
    rounds: int
    most_rounds: int
    seconds: float
    total: float


class watch_tuning:  # noqa: N801 - used like a function
    """Watch the tuning of kernels inside a ``with`` block, in all threads of the process, and bound it.

    It reaches the core's tuner, PyTorch's and the one for nodes inside ONNX Runtime. A measurement that is
    ended is not kept: the kernel of an untuned call runs, and the next call outside of the block is measured.

    Parameters
    ----------
    progress : callable, optional
        Called with a `TuningProgress` before the candidates of an operation are prepared and before every round, in the
        thread that measures.
    cancel : callable, optional
        Asked then; where it returns true, nothing more is measured.
    budget : float, optional
        Seconds that all tuning in the block may take together.

    Raises
    ------
    InputError
        The budget is not positive.

    Notes
    -----
    Blocks nest; the innermost counts. A function that raises ends all tuning of the block, with a warning that names
    the exception; interruptions such as `KeyboardInterrupt` go through.

    Examples
    --------
    >>> import numpy as np, xpuruntime as xrt
    >>> seen = []
    >>> x = np.ones((16, 16), np.float32)
    >>> with xrt.watch_tuning(progress=seen.append, budget=10.0):
    ...     with xrt.use_policy(xrt.KernelPolicy(auto_strategy="best_performance")):
    ...         _ = xrt.ops.matmul(x, x)
    """

    def __init__(
        self,
        *,
        progress: Callable[[TuningProgress], object] | None = None,
        cancel: Callable[[], bool] | None = None,
        budget: float | None = None,
    ) -> None:
        types = {"progress": CALLABLE, "cancel": CALLABLE, "budget": NUMBER}
        check_types(types, {"progress": progress, "cancel": cancel, "budget": budget}, optional=types)
        if budget is not None and not budget > 0:
            msg = f"watch_tuning: the budget is {budget!r}. Fix: give positive seconds, or None for no bound"
            raise InputError(msg)
        self._progress, self._cancel, self._budget = progress, cancel, budget
        self._total, self._broken = 0.0, False
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Seconds that tuning has taken in the block."""
        return self._total

    def __enter__(self) -> Self:
        _watches.append(self)
        _tell_core()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _watches.remove(self)
        _tell_core()

    def step(self, progress: TuningProgress, took: float) -> bool:
        """Count seconds that tuning took, tell them on, and say whether it is to end."""
        with self._lock:
            self._total += took
        try:
            if self._progress is not None and not self._broken:
                self._progress(progress._replace(total=self._total))
            if self._broken or (self._cancel is not None and self._cancel()):
                return True
        except Exception as error:
            self._broken = True
            msg = f"kernels are not tuned any more: the watch raised {type(error).__name__}: {error}"
            warn(msg)
            return True
        return self._budget is not None and self._total >= self._budget


class TuningStep:
    """One measurement's view of the watch: called before the candidates are prepared and before every round."""

    def __init__(self, tuner: str, operation: str) -> None:
        self._tuner, self._operation, self._counted = tuner, operation, 0.0

    def __call__(self, candidates: int, rounds: int, most_rounds: int, seconds: float) -> bool:
        """Say whether the measurement is to end; `seconds` are those since it began."""
        watch = _innermost()
        took, self._counted = max(seconds - self._counted, 0.0), seconds
        if watch is None:
            return False
        progress = TuningProgress(self._tuner, self._operation, candidates, rounds, most_rounds, seconds, 0.0)
        return watch.step(progress, took)

    def end(self, seconds: float) -> None:
        """Count what the last round took."""
        watch = _innermost()
        if watch is not None:
            watch._total += seconds - self._counted


_watches: list[watch_tuning] = []
_core_steps = threading.local()


def _innermost() -> watch_tuning | None:
    return _watches[-1] if _watches else None


def _tell_core() -> None:
    _core.Dispatcher.instance().set_tuning_watch(_core_step if _watches else None)


def _core_step(operation: str, candidates: int, rounds: int, most_rounds: int, seconds: float) -> bool:
    steps: dict[str, TuningStep] = _core_steps.__dict__  # a kernel may call another operation while it is measured
    if most_rounds == 0 or operation not in steps:
        steps[operation] = TuningStep("core", operation)
    return steps[operation](candidates, rounds, most_rounds, seconds)
