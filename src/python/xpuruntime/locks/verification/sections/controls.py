# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of speed: what a session is timed against, in the same rounds."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.errors import XpuRuntimeError, XpuRuntimeWarning
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.locks.session_worker import MODULE, session_worker
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.measuring.rounds import in_worker, timed
from xpuruntime.policies import Policy

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from xpuruntime.inference import InferenceSession
    from xpuruntime.locks.verification.sections.subject import Subject
    from xpuruntime.measuring.rounds import Sampler
    from xpuruntime.policies.verify_policy import Control

__all__ = ["ControlError", "Pair", "open_control", "open_pair", "open_reference"]


#: Products of the anchor, so that they take about as long as its copy.
_PRODUCTS = 20


class Pair(NamedTuple):
    """The session and its control, each as `xpuruntime.measuring.rounds.measure` takes it; and what the control is."""

    session: Sampler
    control: Sampler
    what: str


class ControlError(XpuRuntimeError):
    """There is no control to compare with. Private to the sections: it becomes a claim."""


def open_pair(subject: Subject, stack: ExitStack) -> Pair:
    """Open the control of a subject, and whatever the session is timed in. `stack` closes them."""
    if subject.against is not None:
        return _workers(subject, subject.against, stack)
    stated = subject.limits.speed
    control = "reference" if stated is None else stated.control
    if control == "anchor" and subject.locked is None:
        raise ControlError("an anchor says how fast a machine is, and only a lock has a ratio to it to compare with")
    feeds, session = subject.feeds, subject.session.run
    beside, what = open_control(control, subject.session, subject.model, feeds, stack, trust=subject.trust)
    return Pair(timed(lambda: session(feeds)), beside, what)


def open_control(
    control: Control, session: InferenceSession, model: Any, feeds: dict[str, Any], stack: ExitStack, *, trust: bool
) -> tuple[Sampler, str]:
    """Return a control in this process, and what it is. `stack` closes it."""
    if control == "anchor":
        return timed(_anchor()), "the anchor, a fixed NumPy workload"
    try:
        reference = stack.enter_context(open_reference(session, model, trust=trust))
        reference.run(feeds)
    except XpuRuntimeError as error:
        msg = f"the model does not run as a reference, on the CPU: {error.reason}"
        raise ControlError(msg, fix=error.fix) from None
    run = reference.run
    threads = session.policy.execution.threads
    stated = "without a policy" if threads is None else f"with execution.threads {threads} alone"
    return timed(lambda: run(feeds)), f"{reference.plan.engine}@cpu {stated}"


def open_reference(session: InferenceSession, model: Any, *, trust: bool) -> InferenceSession:
    """Open the model of a session on the CPU with its number of threads, and nothing else of its policy."""
    from xpuruntime.inference import InferenceSession

    engine = "onnxruntime" if session.model.format == "onnx" else session.plan.engine
    threads = session.policy.execution.threads
    policy = Policy.coerce({"execution": {"engine": engine, "device": "cpu", "threads": threads}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XpuRuntimeWarning)
        return InferenceSession(model, policy=policy, trust=trust)


def _anchor() -> Callable[[], None]:
    """Return a fixed workload: products of matrices too small for threads, and a copy too large for small caches."""
    import numpy as np

    factor = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    product, source, target = np.empty_like(factor), np.ones(1 << 19, np.float32), np.empty(1 << 19, np.float32)

    def run() -> None:
        for _ in range(_PRODUCTS):
            np.matmul(factor, factor, out=product)
        np.copyto(target, source)

    return run


def _workers(subject: Subject, python: str, stack: ExitStack) -> Pair:
    """Return the session in a process of this interpreter beside one of another."""
    if not isinstance(subject.model, (str, os.PathLike)):
        raise ControlError("another interpreter needs the file of a model, and this is a module in memory")
    inputs = Path(stack.enter_context(ScratchFolder("verify")), "inputs")
    write_arrays(inputs, subject.feeds)
    model = str(Path(subject.model).resolve())
    arguments = {"policy": subject.policy.replace(verify=None).to_dict(), "trust": subject.trust}
    samplers, what = [], python
    for interpreter in (sys.executable, python):
        worker = stack.enter_context(session_worker(interpreter))
        facts = worker.call(f"{MODULE}:open_session", model=model, inputs=str(inputs), arguments=arguments)
        samplers.append(in_worker(worker, f"{MODULE}:time_session"))
        what = f"{interpreter} ({facts['engine']} {facts['engine_version']}, xpuruntime {facts['xpuruntime']})"
    return Pair(samplers[0], samplers[1], what)
