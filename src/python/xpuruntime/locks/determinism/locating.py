# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Runs in a fresh process, and `locate`: the first node whose tensors differ where a test of determinism fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.errors import XpuRuntimeError
from xpuruntime.evidence.determinism import FirstDifference
from xpuruntime.evidence.tolerances import differing, ulp_distance
from xpuruntime.locks.worker_side.xrt_session_worker import read_arrays, write_arrays
from xpuruntime.printable import error_line
from xpuruntime.runtime.worker import Worker

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo, NodeInfo
    from xpuruntime.inference import InferenceSession
    from xpuruntime.locks.determinism.grades import Mismatch

    Array = np.ndarray[Any, Any]
    #: Repeats the failing test with the tensors of these names; ``None`` where it passes.
    Repeat = Callable[[Sequence[str]], Mismatch | None]


#: A variable of no meaning, whose length moves the stack of the process.
_PADDING = "XPURUNTIME_RESTART_PADDING"
#: Seconds that one process may take.
_LIMIT = 1800.0


def why_not_fresh(session: InferenceSession) -> str | None:
    """Return why a session cannot be opened in a fresh process, or ``None``."""
    from xpuruntime.engines.registry import default_registry

    engine = session._engine
    if session.model.source is not None and not Path(session.model.file).exists():
        return "the model is a module of this process; export it to a file to test a restart"
    known = default_registry()
    if engine.name not in known or type(known.get(engine.name)) is not type(engine):
        return f"the engine {engine.name} is known to this process alone; install it as a plugin"
    return None


def fresh_job(session: InferenceSession, folder: Path, *, trust: bool) -> dict[str, Any]:
    """Return what opens the same session in a fresh process; its calibration is written into `folder`."""
    artifact = session._artifact
    execution = session.policy.execution.replace(
        engine=session.plan.engine, device=session.plan.device, fallback="error"
    )
    calibration = None
    if session._request.calibration is not None:
        samples = folder / "calibration"
        samples.mkdir()
        for index, sample in enumerate(session._request.calibration):
            np.savez(samples / f"{index:08}.npz", **sample)
        calibration = str(samples)
    stated = artifact is not None and session.policy.execution.artifacts.cache == "off"
    return {
        "model": str(artifact.folder if stated and artifact is not None else session.model.file),
        "policy": session.policy.replace(execution=execution).to_dict(),
        "trust": trust,
        "calibration": calibration,
    }


def run_fresh(job: Mapping[str, Any], feeds: Mapping[str, Array], number: int, folder: Path) -> dict[str, Array]:
    """Open the session in a fresh process and run it."""
    write_arrays(folder / "inputs", feeds)
    environment = {"PYTHONHASHSEED": str(number), _PADDING: "x" * (1021 * number)}
    with Worker(environment=environment, timeout=_LIMIT) as worker:
        worker.call(f"{__name__}:run_job", folder=str(folder), **job)
    return read_arrays(folder / "outputs")


def run_job(
    folder: str, model: str, policy: dict[str, Any], names: list[str], calibration: str | None, *, trust: bool
) -> None:
    """Run a session on the inputs in a folder, and write its outputs there: what the fresh process does."""
    import warnings

    from xpuruntime.errors import XpuRuntimeWarning
    from xpuruntime.inference import InferenceSession

    room = Path(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XpuRuntimeWarning)
        with InferenceSession(model, policy=policy, trust=trust, calibration=calibration) as session:
            feeds = read_arrays(room / "inputs")
            outputs = dict(session.run(feeds))
            if names:
                outputs |= session.intermediates(feeds, names)
    write_arrays(room / "outputs", outputs)


def locate(info: ModelInfo, mismatch: Mismatch, repeat: Repeat, compared: Collection[str] | None) -> FirstDifference:
    """Find the first node whose tensors differ."""
    name = differing(mismatch.want, mismatch.got)[0]
    output = FirstDifference(unit=None, tensor=name, ulp_max=ulp_distance(mismatch.want[name], mismatch.got[name]))
    makers = {
        tensor: node
        for node in info.nodes
        if not node.graph and node.op != "Constant"
        for tensor in node.outputs
        if tensor
    }
    if not makers:
        return msgspec.structs.replace(output, note="the model shows no nodes")
    search = _Search(repeat)
    divergence = search.first(list(makers))
    if divergence is None:
        why = search.refused or (
            "no tensor inside differs while all are outputs too, which keeps the engine from fusing nodes: the "
            "difference is in nodes that it fuses"
        )
        return msgspec.structs.replace(output, note=why)
    tensor, ulp = divergence
    node, note = makers[tensor], f"some tensors were not seen: {search.refused}" if search.refused else ""
    hidden = None if compared is None else _first_hidden(info, tensor, makers, compared)
    if hidden is not None:
        note = (
            f"from there on tensors have no rows that could be compared; the first that does and differs is {tensor!r} "
            f"of {node.name} ({node.op})"
        )
        node = hidden
    return FirstDifference(unit=node.name, op=node.op, tensor=tensor, ulp_max=ulp, note=note)


def _first_hidden(
    info: ModelInfo, tensor: str, makers: Mapping[str, NodeInfo], rows: Collection[str]
) -> NodeInfo | None:
    """Return the first node between the tensors with rows and `tensor` whose results have no rows."""
    # A node that reads no tensor with rows, such as one that prepares a weight, is none of them.
    entries: list[NodeInfo] = []
    waiting, done = list(makers[tensor].inputs), set[str]()
    while waiting:
        name = waiting.pop()
        if name in rows or name in done or name not in makers:
            continue
        done.add(name)
        if any(input_ in rows for input_ in makers[name].inputs):
            entries.append(makers[name])
        waiting.extend(makers[name].inputs)
    order = {node.name: index for index, node in enumerate(info.nodes)}
    return min(entries, key=lambda node: order[node.name], default=None)


class _Search:
    def __init__(self, repeat: Repeat) -> None:
        self.repeat = repeat
        self.refused = ""

    def first(self, names: Sequence[str]) -> tuple[str, int | None] | None:
        """Return the first of some tensors that differs; where an engine refuses them together, those of each half."""
        try:
            difference = self.repeat(names)
        except XpuRuntimeError as error:
            if len(names) == 1:
                self.refused = self.refused or error_line(error)
                return None
            middle = len(names) // 2
            return self.first(names[:middle]) or self.first(names[middle:])
        if difference is None:
            return None
        wrong = set(differing(difference.want, difference.got))
        name = next((name for name in names if name in wrong), None)
        return None if name is None else (name, ulp_distance(difference.want[name], difference.got[name]))
