# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of speed: what a session is timed against, in the same rounds."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from xpuruntime.errors import XpuRuntimeError, XpuRuntimeWarning
from xpuruntime.locks.session_worker import MODULE, session_worker
from xpuruntime.locks.worker_side.xrt_session_worker import write_arrays
from xpuruntime.measuring.rounds import in_worker, timed
from xpuruntime.policies import Policy

if TYPE_CHECKING:
    from contextlib import ExitStack

    from xpuruntime.locks.verification.sections.subject import Subject
    from xpuruntime.measuring.rounds import Sampler

__all__ = ["ControlError", "Pair", "open_pair"]


class Pair(NamedTuple):
    """The session and its control, each as `xpuruntime.measuring.rounds.measure` takes it; and what the control is."""

    session: Sampler
    control: Sampler
    what: str


class ControlError(XpuRuntimeError):
    """There is no control to compare with. Private to the sections: it becomes a claim."""


def open_pair(subject: Subject, stack: ExitStack) -> Pair:
    """Open the control of a subject, and whatever the session is timed in. `stack` closes them.

    Raises
    ------
    ControlError
        The model cannot be opened as the control.
    WorkerFailure
        A worker process ended, hung, or could not open the model.
    """
    if subject.against is not None:
        return _workers(subject, subject.against, stack)
    checks = subject.limits.speed
    if checks is not None and checks.control == "anchor":
        raise ControlError("an anchor says how fast a machine is, and only a lock has a ratio to it to compare with")
    return _reference(subject, stack)


def _reference(subject: Subject, stack: ExitStack) -> Pair:
    """Return the session in this process beside the same model on the CPU without a policy."""
    from xpuruntime.inference import InferenceSession

    engine = "onnxruntime" if subject.session.model.format == "onnx" else subject.session.plan.engine
    policy = Policy.coerce({"execution": {"engine": engine, "device": "cpu"}})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", XpuRuntimeWarning)
            control = stack.enter_context(InferenceSession(subject.model, policy=policy, trust=subject.trust))
        control.run(subject.feeds)
    except XpuRuntimeError as error:
        raise ControlError(f"the model does not run as a reference, on {engine}@cpu: {error}") from None
    feeds, session, reference = subject.feeds, subject.session.run, control.run
    return Pair(timed(lambda: session(feeds)), timed(lambda: reference(feeds)), f"{engine}@cpu without a policy")


def _workers(subject: Subject, python: str, stack: ExitStack) -> Pair:
    """Return the session in a process of this interpreter beside one of another."""
    if not isinstance(subject.model, (str, os.PathLike)):
        raise ControlError("another interpreter needs the file of a model, and this is a module in memory")
    inputs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xrt-verify-")), "inputs")
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
