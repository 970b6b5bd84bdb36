# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arguments of a session, the policy in its model, and `settle_policy`: the one policy that decides everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypedDict

import msgspec

from xpuruntime.argument_types import FLAG, PATH, TEXTS, check_types
from xpuruntime.errors import InputError, LockError, ModelError, PolicyError
from xpuruntime.evidence.metadata import (
    LOCK_KEY,
    OP_OF_NODE,
    OP_OF_TORCH,
    POLICY_KEY,
    module_of_node,
    read_policy,
)
from xpuruntime.policies.document import nearest

if TYPE_CHECKING:
    import os

    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.evidence.records import Unit
    from xpuruntime.inference.locked import SessionLock
    from xpuruntime.lockfile.canonical import ExportLock
    from xpuruntime.planning import Plan
    from xpuruntime.policies import ExecutionPolicy, KernelPolicy, Policy
    from xpuruntime.policies.execution_policy import Precision

    ModelLike = str | os.PathLike[str] | Any
    PolicyLike = Policy | str | os.PathLike[str] | Mapping[str, Any]


class PolicyAliases(TypedDict, total=False):
    """Other ways to state a part of the policy, beside `policy`, `engine` and `precision`."""

    kernel_policy: KernelPolicy | None
    exec_policy: ExecutionPolicy | None
    backend: str | Sequence[str] | None
    fp16: bool


class SessionArguments(NamedTuple):
    """The arguments of `InferenceSession` that decide its policy, trust and lock, under the same names."""

    policy: PolicyLike | None = None
    device: str | None = None
    engine: str | Sequence[str] | None = None
    precision: Precision | None = None
    lock: str | os.PathLike[str] | None = None
    frozen: bool = False
    trust: bool = False
    kernel_policy: KernelPolicy | None = None
    exec_policy: ExecutionPolicy | None = None
    backend: str | Sequence[str] | None = None
    fp16: bool = False

    def with_aliases(self, aliases: Mapping[str, Any], function: str) -> SessionArguments:
        """Return it with `PolicyAliases`; other keywords are refused as Python does. Raises TypeError."""
        for name in aliases:
            if name not in PolicyAliases.__annotations__:
                raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        return self._replace(**aliases)

    def checked(self) -> SessionArguments:
        """Return them without aliases and with the policy read. Raises TypeError, `InputError` or `PolicyError`."""
        from xpuruntime.policies import Policy

        types = {"fp16": FLAG, "trust": FLAG, "frozen": FLAG, "lock": PATH, "engine": TEXTS, "backend": TEXTS}
        check_types(types, self._asdict(), optional=("engine", "backend", "lock"))
        engine, backend, precision = self.engine, self.backend, self.precision
        if engine is not None and backend is not None and engine != backend:
            raise PolicyError(
                f"engine={engine!r} and backend={backend!r} contradict each other; backend is an alias, state one of "
                "them"
            )
        if self.fp16 and precision not in (None, "fp16"):
            raise PolicyError(f"fp16=True and precision={precision!r} contradict each other. Fix: state one of them")
        if self.frozen:
            if self.lock is None:
                raise InputError(
                    "frozen takes the policy from a lock, and none is named. Fix: name it with lock= (--lock)"
                )
            if stated := self._stated():
                raise PolicyError(
                    f"frozen takes the policy from the lock. Fix: leave out {', '.join(stated)}, or frozen"
                )
        return self._replace(
            engine=backend if engine is None else engine,
            backend=None,
            precision="fp16" if self.fp16 else precision,
            fp16=False,
            policy=None if self.policy is None else Policy.coerce(self.policy),
        )

    def _stated(self) -> list[str]:
        names = ("device", "engine", "kernel_policy", "exec_policy", "policy", "precision", "backend")
        return [name for name in names if getattr(self, name) is not None] + (["fp16"] if self.fp16 else [])

    def merged(self, base: Policy | None = None) -> Policy:
        """Return the caller's policy, else `base`, with the other arguments in it, and its paths absolute.

        Of arguments that were `checked`.
        """
        from xpuruntime.policies import Policy
        from xpuruntime.policies.kinds import in_folder

        policy: Policy = self.policy or base or Policy()  # type: ignore[assignment]
        merged = policy.with_overrides(
            device=self.device,
            engine=self.engine,
            precision=self.precision,
            kernel_policy=self.kernel_policy,
            exec_policy=self.exec_policy,
        )
        return merged.relocated(in_folder(""))


class SessionPolicy(NamedTuple):
    """The policy that a session is decided by, whose it is, what the plan says of that, and the lock that it names."""

    policy: Policy
    source: str
    notes: tuple[str, ...]
    lock: SessionLock | None


def settle_policy(arguments: SessionArguments, artifact: Artifact | None, info: ModelInfo) -> SessionPolicy:
    """Return the policy that everything is decided by: the only place where policies of a session meet.

    The caller's holds, else that of the lock, else of the artifact, else of the model; the other arguments are put into
    it. What a lock lets a session run under follows from its validators, see `lock_in_force`.
    """
    base: Policy | None = None
    notes: tuple[str, ...] = ()
    source = "stated" if arguments._stated() else "default"
    if artifact is not None:
        from xpuruntime.artifacts.manifest import artifact_policy

        base, source = artifact_policy(artifact), "stated" if arguments.policy is not None else "artifact"
    elif carries_policy(info):
        if arguments.policy is not None:
            notes = (f"{info.path} carries a policy of its own, which the stated one replaces",)
        else:
            base, left_out = carried_policy(info)
            source = "model metadata"
            told = [f"no policy was stated, so that the one in {info.path} holds (source: {source})"]
            if arguments.kernel_policy is not None:
                told.append("kernel_policy replaces the kernels of the model's own policy")
            if arguments.exec_policy is not None:
                told.append("exec_policy replaces the execution section of the model's own policy")
            notes = (*told, *left_out)
    policy = arguments.merged(base)
    path = policy.execution.lock if arguments.lock is None else arguments.lock
    if path is None:
        return SessionPolicy(policy, source, notes, None)
    from xpuruntime.inference.locked import read_session_lock

    lock = read_session_lock(path)
    return SessionPolicy(arguments.merged(lock.policy), source, notes, lock)


#: Execution provider to the arguments that ask for the same.
_PROVIDERS = {
    "CPUExecutionProvider": 'device="cpu", engine="onnxruntime"',
    "CUDAExecutionProvider": 'device="cuda:0", engine="onnxruntime"',
    "TensorrtExecutionProvider": 'device="cuda:0", engine="tensorrt"',
    "NvTensorRTRTXExecutionProvider": 'device="cuda:0", engine="tensorrt-rtx"',
    "OpenVINOExecutionProvider": 'device="cpu", engine="openvino"',
    "QNNExecutionProvider": 'device="npu", engine="qnn"',
    "MIGraphXExecutionProvider": 'device="rocm:0", engine="onnxruntime"',
    "CoreMLExecutionProvider": 'device="metal", engine="onnxruntime"',
    "DmlExecutionProvider": 'device="dml:0", engine="onnxruntime"',
}
#: Argument to what says the same.
_ARGUMENTS = {
    "sess_options": "policy={'execution': {'threads': 4, 'provider_options': {'onnxruntime': "
    "{'graph_optimization_level': 'all'}}}}",
    "provider_options": "policy={'execution': {'provider_options': {'onnxruntime': {...}}}}",
    "disabled_optimizers": "policy={'execution': {'provider_options': {'onnxruntime': "
    "{'optimization.disable_specified_optimizers': 'GeluFusionL2'}}}}",
    "enable_fallback": "nothing: no session falls back by itself; policy={'execution': {'fallback': [...]}} does",
}
#: Attribute to what says the same.
_ATTRIBUTES = {
    "get_inputs": "session.inputs, each with name, dtype and shape",
    "get_outputs": "session.outputs, each with name, dtype and shape",
    "get_overridable_initializers": "session.model.overridable_inputs",
    "get_providers": "session.plan.engine and session.plan.device; session.explain() shows what ran",
    "get_provider_options": "session.plan.settings",
    "get_session_options": "session.plan.settings, made from session.policy",
    "get_modelmeta": "session.model, with metadata, producer and opsets",
    "get_profiling_start_time_ns": "xrt.profile(), which records what runs in a block",
    "end_profiling": "xrt.profile(), which records what runs in a block",
    "io_binding": "session.bind(inputs, outputs)",
    "run_with_iobinding": "binding = session.bind(inputs, outputs), then binding.run()",
    "run_with_ort_values": "session.run({name: array}), which takes arrays of any device through DLPack",
    "run_with_ortvaluevector": "session.run({name: array}), which takes arrays of any device through DLPack",
    "set_providers": "xrt.InferenceSession(model, device=...), a new session",
    "disable_fallback": "nothing: no session falls back by itself",
    "enable_fallback": "policy={'execution': {'fallback': [...]}}",
}


#: What others call an argument.
_ELSEWHERE = {"path": "output", "file": "output", "out": "output", "batch_sizes": "batches", "force": "upgrade"}


def refuse_arguments(
    options: Mapping[str, Any], second: Any, own: Iterable[str] = (), *, function: str = "InferenceSession"
) -> None:
    """Refuse arguments that a function does not have: one that takes those of a session, and `own`."""
    others = ("model", "example_inputs", "calibration", "plan", "registry", "machine")
    names = (*own, *SessionArguments._fields, *others)
    options = {name: value for name, value in options.items() if name not in names}
    if type(second).__name__ == "SessionOptions":
        options = {**options, "sess_options": second}
    if not options:
        return
    theirs = sorted(name for name in options if name in ("path_or_bytes", "providers") or name in _ARGUMENTS)
    if theirs:
        named = ", ".join(f"{name}=" for name in theirs)
        msg = f"{named} of ONNX Runtime's session {'is' if len(theirs) == 1 else 'are'} no argument of this one"
        fixes = [f"{function}(model)"] if "path_or_bytes" in theirs else []
        fixes = [f"{function}(model, {_provider(options['providers'])})"] if "providers" in theirs else fixes
        fixes += [_ARGUMENTS[name] for name in theirs if name in _ARGUMENTS]
        raise InputError(msg, fix="; ".join(fixes))
    name = min(options)
    near = _ELSEWHERE[name] if _ELSEWHERE.get(name) in names else nearest(name, names)
    fix = f"{function}(model, {near}=...)" if near else f"leave it out; there are {', '.join(names)}"
    raise TypeError(f"{function} has no argument {name!r}. Fix: {fix}")


def _provider(providers: Any) -> str:
    first = providers[0] if isinstance(providers, (list, tuple)) and providers else providers
    name = first[0] if isinstance(first, tuple) and first else first
    known = _PROVIDERS.get(name) if isinstance(name, str) else None
    return known or "device=..., engine=..."


def refuse_attribute(name: str) -> NoReturn:
    """Refuse an attribute that a session does not have. Raises AttributeError."""
    msg = f"InferenceSession has no attribute {name!r}"
    raise AttributeError(f"{msg}. Fix: {_ATTRIBUTES[name]}" if name in _ATTRIBUTES else msg)


#: Kernels that a note names.
_NAMED = 4


def carries_policy(info: ModelInfo) -> bool:
    """Say whether a model has a policy of its own."""
    return POLICY_KEY in info.metadata or any(node.kernels for node in info.nodes)


def carried_policy(info: ModelInfo) -> tuple[Policy | None, list[str]]:
    """Return the policy that a model carries, and notes on what is left out of it."""
    marks = [(node.name, node.op, node.kernels) for node in info.nodes if node.kernels]
    try:
        policy = read_policy(info.metadata.get(POLICY_KEY), marks, POLICY_KEY)
    except PolicyError as error:
        fix = "export it again, or state a policy, which then holds instead"
        raise ModelError(
            f"cannot use the model {info.path!r}: the policy that it carries: {error}. Fix: {fix}."
        ) from None
    return _without_places(policy)


def _without_places(policy: Policy | None) -> tuple[Policy | None, list[str]]:
    """Return a model's policy without folders and files: where they are is not for a model to say."""
    if policy is None:
        return None, []
    execution, why = policy.execution, "is left out: a model does not say where files are read or written"
    notes = []
    if execution.artifacts.cache not in ("off", "default"):
        notes.append(f"execution.artifacts.cache of the model's own policy {why}")
        execution = execution.replace(artifacts=execution.artifacts.replace(cache="off"))
    options: dict[str, dict[str, Any]] = {}
    for engine, option in execution.provider_options.items():
        for name, value in option.items():
            if isinstance(value, str) and ("/" in value or "\\" in value):
                notes.append(f"execution.provider_options.{engine}.{name} of the model's own policy {why}")
            else:
                options.setdefault(engine, {})[name] = value
    if notes:
        execution = execution.replace(provider_options=options)
    return policy.replace(execution=execution), notes


def check_export_lock(info: ModelInfo, plan: Plan) -> Plan:
    """Return the plan with what the model's lock and the plan disagree on."""
    text = info.metadata.get(LOCK_KEY)
    if text is None:
        return plan
    from xpuruntime.lockfile.canonical import ExportLock

    warnings: list[str] = []
    notes: list[str] = []
    try:
        lock = ExportLock.from_json(text, info.path)
        notes.append(f"exported by torch {lock.torch}, {lock.exporter}, on {_place(lock)}")
        if info.weights_digest is None:
            notes.append("the lock was not compared with the weights: they are in other files")
        elif info.weights_digest != lock.weights:
            msg = (
                f"{info.path} has other weights than those that were exported, so what was shown of the exported model "
                "is not shown of it. Fix: export it again"
            )
            raise LockError(msg)
    except LockError as error:
        if plan.mode == "strict":
            raise
        warnings.append(str(error))
    return msgspec.structs.replace(plan, warnings=(*plan.warnings, *warnings), notes=(*plan.notes, *notes))


def _place(lock: ExportLock) -> str:
    return f"{lock.device} ({lock.device_name}, {lock.arch})" if lock.arch else lock.device


def compare_kernels(info: ModelInfo, plan: Plan, arch: str | None, units: Sequence[Unit]) -> tuple[str, ...]:
    """Return notes on kernels that ran here and others that the model's lock has."""
    from xpuruntime.lockfile.canonical import ExportLock

    try:
        lock = ExportLock.from_json(info.metadata[LOCK_KEY], info.path)
    except (KeyError, LockError):  # nothing to compare with; the plan has said so
        return ()
    if not lock.kernels:
        return ()
    if plan.device.partition(":")[0] != lock.device.partition(":")[0] or (lock.arch or None) != arch:
        return (f"the kernels in the lock are of {_place(lock)}, and are not compared with those of {plan.device}",)
    operators = {node.name: node.op for node in info.nodes}
    others: dict[str, int] = {}
    compared = 0
    for unit in units:
        node = next((name for name in unit.source_nodes if _operation(operators.get(name, "")) is not None), None)
        if node is None or unit.kernel is None or unit.kernel_source != "reported":
            continue
        op = _operation(operators[node])
        rows = [kernel for kernel in lock.kernels if kernel.op == op and kernel.module in ("", module_of_node(node))]
        if not rows:
            continue
        compared += 1
        known = {row.kernel.partition("@")[0] for row in rows}
        ran = {kernel.strip().partition("@")[0] for kernel in unit.kernel.split(", ")}
        if not ran & known:
            text = f"{node} ({op}) ran {unit.kernel}, and the lock has {', '.join(sorted(known))}"
            others[text] = others.get(text, 0) + 1
    if not others:
        return (f"{compared} units ran the kernels that the lock has for their operation",) if compared else ()
    shown = list(others)[:_NAMED]
    tail = f"; and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    return (f"other kernels than in the lock: {'; '.join(shown)}{tail}",)


def _operation(operator: str) -> str | None:
    return OP_OF_NODE.get(operator) or OP_OF_TORCH.get(operator.rpartition(".")[2])
