# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Native configuration of a locked session: what an engine writes, and what becomes of each key of the policy."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec

from xpuruntime.engines.control_builder import ENGINE_CHOICE, fp32_nodes
from xpuruntime.engines.model.external import is_external
from xpuruntime.engines.model.graph import tensors
from xpuruntime.engines.native_export import native_side
from xpuruntime.engines.native_export.native_side import read_arrays, write_arrays
from xpuruntime.errors import EngineFailed, EngineUnavailable, InputError, LockError, ModelError
from xpuruntime.files.scratch import ScratchFolder
from xpuruntime.runtime.worker import Worker, WorkerFailure

if TYPE_CHECKING:
    from xpuruntime.engines.base import EngineSettings, Observed, Request
    from xpuruntime.engines.model import TensorInfo
    from xpuruntime.engines.model_source import ModelSource

#: The file that says what a folder was exported as.
RECORD = "export.json"
SCRIPT, REQUIREMENTS = "session.py", "requirements.txt"
OutcomeWord = Literal["kept", "weakened", "lost"]
_Settings = TypeVar("_Settings", bound="EngineSettings")


class KeyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one key of the policy in a native configuration.

    Attributes
    ----------
    key, requested, resolved : str
        The key, its value in the policy, and what the plan of the lock made of it.
    enforceability : str
        In xpuruntime: ``"enforced"``, ``"advisory"`` or ``"unsupported"``.
    outcome : {"kept", "weakened", "lost"}
        ``kept``: the native configuration asks the engine for the same. ``weakened``: it asks for it, and less is
        checked or refused than in a session. ``lost``: nothing in it asks for that.
    reason : str
    """

    key: str
    requested: str
    resolved: str
    enforceability: str
    outcome: OutcomeWord
    reason: str


class ExportJob(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine exports: the session of a lock."""

    request: Request
    settings: dict[str, Any]
    controls: dict[str, tuple[str, str]]
    stated: dict[str, str]
    version: str
    package: str
    digest: str
    engine: str
    name: str
    lock_path: str = ""
    shapes: dict[str, tuple[int, ...]] = {}
    environment: dict[str, str] = {}


class NativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine wrote."""

    outcomes: tuple[KeyOutcome, ...]
    entry: str
    command: str
    notes: tuple[str, ...] = ()


class NativeRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a native configuration did in an interpreter without xpuruntime."""

    facts: dict[str, str]
    outputs: dict[str, Any]
    observed: Observed | None


class NativeExporter(ABC):
    """Writes the sessions of one engine as native configuration. Made for one export."""

    targets: ClassVar[dict[str, str]]
    proved: ClassVar[tuple[str, ...]] = ()
    #: The file whose ``run`` runs a script of `write_script`, copied to where xpuruntime cannot be imported.
    worker: ClassVar[Path]

    def __init__(self, job: ExportJob) -> None:
        self.job = job

    @abstractmethod
    def write(self, target: str, folder: Path) -> NativeConfig:
        """Write into an empty folder."""

    def settings_as(self, kind: type[_Settings]) -> _Settings:
        """Return the settings of the plan in the engine's own type. Raises `LockError` where they are of another."""
        try:
            return msgspec.convert(self.job.settings, kind)
        except msgspec.ValidationError as error:
            raise self.damaged(str(error)) from None

    def damaged(self, reason: str) -> LockError:
        """Return the error of a lock whose settings are none of the engine."""
        return LockError(
            f"{self.job.lock_path} is a damaged lock: the settings of its plan are none of {self.job.engine}: "
            f"{reason}. Fix: restore the file, or make it again with `xrt lock`"
        )

    @abstractmethod
    def device_word(self) -> str:
        """Return what the engine itself calls the locked device, as `NativeRun.facts` has it."""

    def write_script(
        self, folder: Path, text: str, outcomes: tuple[KeyOutcome, ...], notes: Iterable[str] = ()
    ) -> NativeConfig:
        """Write a script that reads arrays and writes arrays, with what it requires."""
        (folder / SCRIPT).write_text(text, encoding="utf-8")
        (folder / REQUIREMENTS).write_text(f"{self.job.package}\nnumpy\n".lstrip(), encoding="utf-8")
        checked = "of the validators of the lock, the script checks the engine's version alone"
        return NativeConfig(
            outcomes=outcomes,
            entry=SCRIPT,
            command=f"python {SCRIPT} INPUTS.npz OUTPUTS.npz",
            notes=(*notes, *bits_note(*self.bits()), checked),
        )

    def bits(self) -> tuple[list[str], list[str]]:
        """Return the inputs and the outputs of the type bfloat16, which a script takes and gives as their bits."""
        model = self.job.request.model
        return bfloat16_names(model.inputs), bfloat16_names(model.outputs)

    def run(self, target: str, folder: Path, feeds: Mapping[str, Any], python: str | None) -> NativeRun:
        """Run what was written in a fresh interpreter that cannot import xpuruntime."""
        del target
        with native_call(self.worker, folder / SCRIPT, feeds, python, self.job.engine) as answer:
            return NativeRun(
                facts=answer.value["facts"],
                outputs=from_bits(answer.outputs, self.job.request.model.outputs),
                observed=self.observed(feeds, answer.value),
            )

    def observed(self, feeds: Mapping[str, Any], value: dict[str, Any]) -> Observed | None:
        """Return what the worker saw, in the terms of the source model; `value` is what it returned."""
        raise NotImplementedError(feeds, value)


class KeyOutcomes:
    """Collects one outcome for each stated key. What nobody spoke for is lost."""

    def __init__(self, job: ExportJob, runtime: str) -> None:
        self._job, self._runtime = job, runtime
        self._found: dict[str, KeyOutcome] = {}

    def add(self, key: str, outcome: OutcomeWord, reason: str) -> None:
        """Say what becomes of a key, if it is stated and nobody spoke for it; ``key.`` stands for all below it.

        A key that the engine has no means for is lost, whatever is said.
        """
        for name, requested in self._job.stated.items():
            if name in self._found or not (name == key or (key.endswith(".") and name.startswith(key))):
                continue
            resolved, level = self._job.controls.get(name, ("-", "unsupported"))
            word, why = outcome, reason
            if level == "unsupported":
                word, why = "lost", "the engine has no means for it, in xpuruntime neither"
            self._found[name] = KeyOutcome(
                key=name, requested=requested, resolved=resolved, enforceability=level, outcome=word, reason=why
            )

    def add_options(self, names: Iterable[str], options: Iterable[str], outcome: OutcomeWord, reason: str) -> None:
        """Say what becomes of provider options, under each name of the engine; ``""`` stands for all others."""
        for key in itertools.product(names, options):
            self.add(f"execution.provider_options.{'.'.join(key)}", outcome, reason)

    def add_determinism(self, outcome: OutcomeWord, reason: str) -> None:
        """Say what becomes of ``execution.determinism``; a grade that rests on padded batches is lost with them."""
        execution = self._job.request.policy.execution
        if execution.static_batch is not None and execution.determinism in ("batch_position", "batch_invariant"):
            self.add("execution.determinism", "lost", "it rests on execution.static_batch")
        self.add("execution.determinism", outcome, reason)

    def add_kernels(
        self,
        keep_fp32: Collection[str],
        own: str,
        others: str,
        *,
        choice: str = ENGINE_CHOICE,
        options: Collection[str] = (),
    ) -> None:
        """Say what becomes of the kernel keys."""
        rules = enumerate(self._job.request.policy.kernels.rules)
        in_graph = {f"kernels.rules[{index}]" for index, rule in rules if fp32_nodes(rule) in keep_fp32}
        for key, (resolved, _) in self._job.controls.items():
            if key.startswith("kernels."):
                free = resolved in (choice, "first_supported")
                kept = free or key in in_graph or resolved.partition("=")[0] in options
                self.add(key, "kept" if kept else "lost", own if kept else others)

    def settle(self, *, device: str) -> tuple[KeyOutcome, ...]:
        """Add what holds for every engine, and return the outcomes in the order of their keys."""
        self.add("execution.engine", "kept", f"{self._runtime} is what runs")
        self.add("execution.device", "kept", device)
        self.add("execution.fallback", "kept", "one device is named, and no other is tried")
        self.add("calibration.", "kept", "the graph that is written is quantized with them")
        self.add("accuracy.", "lost", "outputs are compared with no reference; `xrt verify` does")
        self.add("execution.static_batch", "lost", "batches are not padded")
        self.add("execution.static_shape", "kept", "the graph that is written has fixed sizes")
        self.add("execution.artifacts.", "lost", "no compiled model is kept")
        self._other_engines()
        for key in self._job.stated:
            if key != "mode":
                self.add(key, "lost", f"{self._runtime} has no setting for it")
        if "mode" in self._job.stated:
            self._mode()
        return tuple(self._found[key] for key in sorted(self._found))

    def _other_engines(self) -> None:
        head = "execution.provider_options."
        for key in self._job.stated:
            if key.startswith(head) and self._job.controls.get(key, ("", ""))[0] == "-":
                self.add(key, "kept", "it is for another engine, and asks nothing here")

    def _mode(self) -> None:
        requested = self._job.stated["mode"]
        less = [outcome.key for outcome in self._found.values() if outcome.outcome != "kept"]
        reason = f"not every key is kept: {', '.join(less[:4])}" if less else "every other key is kept"
        self._found["mode"] = KeyOutcome(
            key="mode",
            requested=requested,
            resolved=requested,
            enforceability="enforced",
            outcome="weakened" if less else "kept",
            reason=reason,
        )


_MAIN = """\
if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: session.py INPUTS.npz OUTPUTS.npz")
    with np.load(sys.argv[1], allow_pickle=False) as inputs:
        outputs = run({opener}(), dict(inputs))
    np.savez(sys.argv[2], **outputs)
"""


def script_main(opener: str) -> str:
    """Return the end of a script, by which it runs as a program."""
    return _MAIN.format(opener=opener)


def bfloat16_names(tensors: Iterable[TensorInfo]) -> list[str]:
    """Return the tensors of the type bfloat16, which NumPy lacks: scripts take and give their bits as ``uint16``."""
    return [tensor.name for tensor in tensors if tensor.dtype == "bfloat16"]


def bits_note(taken: Sequence[str], output_names: Sequence[str]) -> tuple[str, ...]:
    """Return what is to be said of bfloat16 inputs and outputs of a script; empty where there are none."""
    names = ", ".join([*taken, *(name for name in output_names if name not in taken)])
    return (f"bfloat16 is taken and given as its bits, in arrays of uint16: {names}",) if names else ()


def from_bits(outputs: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> dict[str, Any]:
    """Return the outputs of a script with those in bfloat16 in that type of ``ml_dtypes``, as sessions give them."""
    bits = dict(outputs)
    for name in bfloat16_names(tensors):
        if name in bits:
            import ml_dtypes

            bits[name] = bits[name].view(ml_dtypes.bfloat16)
    return bits


def python_literal(values: Mapping[str, Any]) -> str:
    """Return a mapping as Python source, one entry a line, sorted."""
    if not values:
        return "{}"
    return "{\n" + "".join(f"    {key!r}: {value!r},\n" for key, value in sorted(values.items())) + "}"


#: Seconds that loading and running a model may take.
_TIMEOUT = 600.0


class NativeAnswer(NamedTuple):
    """What the function returned, the outputs that it wrote, and the folder of its other files."""

    value: dict[str, Any]
    outputs: dict[str, Any]
    folder: Path


@contextlib.contextmanager
def native_call(
    worker_file: Path, script: Path, feeds: Mapping[str, Any], python: str | None, engine: str, **arguments: Any
) -> Iterator[NativeAnswer]:
    """Call ``run(script, inputs, outputs, folder, ...)`` of a stand-alone file in a fresh interpreter."""
    with ScratchFolder("export") as scratch:
        folder = Path(scratch)
        for source in (Path(native_side.__file__), worker_file):
            shutil.copyfile(source, folder / source.name)
        inputs, outputs = str(folder / "inputs"), str(folder / "outputs")
        try:
            write_arrays(inputs, feeds)
        except ValueError as error:
            raise InputError(f"the inputs cannot be handed to another interpreter: {error}") from None
        try:
            with Worker(
                python, pythonpath=[folder], environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, timeout=_TIMEOUT
            ) as worker:
                value = worker.call(
                    f"{worker_file.stem}:run",
                    script=str(script),
                    inputs=inputs,
                    outputs=outputs,
                    folder=str(folder),
                    **arguments,
                )
        except WorkerFailure as failure:
            if "ImportError" in failure.exceptions:
                raise EngineUnavailable(
                    f"{script} does not run: {failure.reason}. Fix: pip install -r "
                    f"{script.with_name('requirements.txt')}, or name another interpreter with --python",
                    engine=engine,
                ) from None
            raise EngineFailed(f"{script} does not run: {failure}", engine=engine) from None
        yield NativeAnswer(value, read_arrays(outputs), folder)


def write_model(source: ModelSource, folder: Path, *, also: Sequence[str] = ()) -> None:
    """Write a prepared model as ``model.onnx``, and its external data at the same relative places, into a folder."""
    import onnx

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "model.onnx"
    if isinstance(source.model, bytes):
        target.write_bytes(source.model)
        base = source.folder
    else:
        shutil.copyfile(source.model, target)
        base = str(Path(source.model).resolve().parent) if source.folder is None else source.folder
    proto = onnx.load(str(target), load_external_data=False)
    places = {
        entry.value
        for tensor in tensors(proto)
        if is_external(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    for location in sorted(places):
        if Path(location).is_absolute() or ".." in Path(location).parts or base is None:
            raise ModelError(
                f"{source.label}: its data {location!r} is outside of its folder. Fix: save the model again"
            )
        target = free_place(folder, location, also=also)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(base) / location, target)


def free_place(folder: Path, name: str, *, also: Sequence[str] = ()) -> Path:
    """Return the place of a file of a model in an export."""
    if os.path.normpath(name) in also or os.path.lexists(folder / name):
        raise ModelError(
            f"{name!r} is a file of the model, and an export writes a file of that name. Fix: save the model again "
            "with its data in a file of another name, such as weights.bin"
        )
    return folder / name
