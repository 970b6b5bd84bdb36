# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of the torch engine for the keys of a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.control_builder import ControlBuilder, check_options, own_options, show
from xpuruntime.engines.torch.decoder_folder import FORMAT as DECODER
from xpuruntime.engines.torch.names import NAMES, OPTIONS, DecoderSettings, TorchSettings
from xpuruntime.engines.torch.pinning import operation_of, placed_rules
from xpuruntime.engines.torch.uncovered_calls import UncoveredCalls, uncovered_calls
from xpuruntime.engines.written_out import absence, written_out
from xpuruntime.errors import PolicyError
from xpuruntime.policies.document import question
from xpuruntime.policies.kernel_rules import KERNEL_IDS, OPS, TENSOR_OPS, computed_by, misspelt_kernel
from xpuruntime.runtime.packages import installed

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.evidence.records import Control, Enforceability

_WHERE = "execution.provider_options.torch"
_ON_CUDA = "use device cuda:0, or leave the key out"
_COMPILE = ("compile_mode", "fullgraph", "dynamic")
#: Most tokens of a text in a captured cache, where the policy states none.
_LENGTH = 4096


def resolve_settings(request: Request) -> tuple[TorchSettings, tuple[Control, ...]]:
    """Resolve the policy of `request` for PyTorch on its device. Pure."""
    policy, execution = request.policy, request.policy.execution
    cuda = request.device.startswith("cuda")
    builder = ControlBuilder(policy.stated())
    builder.common(request, NAMES[0], checked="every parameter and every result is on it")
    options = check_options(own_options(execution.provider_options, NAMES), OPTIONS, _WHERE)
    builder.options(_WHERE, NAMES, "validated and handed to torch.compile, or to the choice of how to run")
    mode = options.pop("mode", "eager")
    name = next((name for name in options if name in _COMPILE), None)
    if mode == "eager" and name is not None:
        msg = f"{_WHERE}: {name!r} is an option of torch.compile. Fix: state mode: compile too, or remove it"
        raise PolicyError(msg, engine=NAMES[0])
    if execution.cuda_graph != "off" and options.get("compile_mode") in ("reduce-overhead", "max-autotune"):
        msg = (
            f"{_WHERE}: compile_mode {options['compile_mode']} captures CUDA graphs of its own, which do not nest in "
            "execution.cuda_graph. Fix: state one of them"
        )
        raise PolicyError(msg, engine=NAMES[0])
    fields: dict[str, Any] = {"mode": mode, "compile": {n: options[n] for n in _COMPILE if n in options}}
    decodes = request.model.format == DECODER
    if decodes:
        fields.update(_decoding(request, builder, options, mode))
    elif "max_length" in options:
        msg = f"{_WHERE}: 'max_length' is of folders of transformers, which generate. Fix: remove it"
        raise PolicyError(msg, engine=NAMES[0])
    fields.update(_precision(request, builder, cuda=cuda))
    fields.update(_execution(request, builder, cuda=cuda))
    settings = (DecoderSettings if decodes else TorchSettings)(strict=policy.mode == "strict", **fields)
    if any(key.startswith("kernels.") for key in builder.stated):
        resolve_kernels(request, builder, compiled=mode == "compile")
    return settings, builder.finish("PyTorch")


def _decoding(request: Request, builder: ControlBuilder, options: dict[str, str], mode: str) -> dict[str, Any]:
    execution = request.policy.execution
    captures = execution.cuda_graph != "off" and request.device.startswith("cuda")
    for name, needed in (("max_length", captures), ("mode", captures or mode == "eager")):
        if (name in options or name == "mode") and not needed:
            msg = (
                f"{_WHERE}: {name!r} is of captured decode steps. "
                "Fix: state execution.cuda_graph: prefer on a CUDA device"
            )
            raise PolicyError(f"{msg}, or remove it", engine=NAMES[0])
    builder.shapes(request, "any length up to the context runs")
    wanted = execution.weights
    if wanted.storage is not None:
        for key in ("storage", "compute", "group", "exclude"):
            name = f"execution.weights.{key}"
            builder.add(name, str(getattr(wanted, key)), "enforced", "torchao quantizes linear layers at loading")
    context = request.model.source.context
    length = int(options.get("max_length", min(_LENGTH, context)))
    if length > context:
        msg = f"{_WHERE}: max_length is {length}, and the context has {context} tokens. Fix: state {context} or less"
        raise PolicyError(msg, engine=NAMES[0])
    version = installed("transformers").get("transformers", "")
    return {"dtype": _loaded_in(request), "max_length": length, "transformers": version}


def _loaded_in(request: Request) -> str | None:
    precision = request.policy.execution.precision
    return {"tf32": "fp32", "model": None}.get(precision, precision)


def _precision(request: Request, builder: ControlBuilder, *, cuda: bool) -> dict[str, Any]:
    execution = request.policy.execution
    precision = execution.precision
    decodes = request.model.format == DECODER
    convert = precision if precision in ("fp16", "bf16") and not decodes else None
    key = "execution.precision"
    if decodes and precision != "model":
        dtype = _loaded_in(request)
        builder.add(key, f"weights loaded in {dtype}", "enforced", "all arithmetic follows them")
    elif convert is not None:
        reason = "weights and arithmetic are converted; inputs and outputs keep their types"
        builder.add(key, f"weights converted to {convert}", "enforced", reason)
    elif precision == "fp32":
        reason = "fp32 excludes TF32: torch's switches are set for the process" if cuda else "the CPU computes fp32"
        builder.add(key, "tf32 off" if cuda else "the model's own types", "enforced", reason)
    elif precision == "tf32":
        builder.add(key, "tf32 on", "enforced", "TF32 is allowed for fp32 matmul and conv, for the process")
    else:
        builder.add(key, "the model's own types", "enforced", "nothing is converted")
    tf32 = execution.tf32 if execution.tf32 is not None else {"fp32": False, "tf32": True}.get(precision)
    if cuda:
        builder.add("execution.tf32", show(bool(tf32)), "enforced", "torch's process-wide switches, read back")
        return {"convert": convert, "tf32": tf32}
    if tf32 is False:
        builder.add("execution.tf32", "false", "enforced", "the CPU has no TF32")
    else:
        builder.add("execution.tf32", "-", "unsupported", "the CPU has no TF32", _ON_CUDA)
    return {"convert": convert}


def _execution(request: Request, builder: ControlBuilder, *, cuda: bool) -> dict[str, Any]:
    execution = request.policy.execution
    fields: dict[str, Any] = {}
    if execution.deterministic:
        fields["deterministic"] = True
        reason = "operators that have no deterministic form raise"
        builder.determinism(request, "torch.use_deterministic_algorithms, for the process", "enforced", reason)
    if execution.threads is not None:
        if cuda:
            builder.add("execution.threads", "-", "unsupported", "the model runs on the GPU")
        else:
            fields["threads"] = execution.threads
            reason = "torch.set_num_threads, read back"
            builder.add("execution.threads", str(execution.threads), "enforced", f"for the process: {reason}")
    if execution.cuda_graph != "off":
        if cuda:
            fields["graph"] = execution.cuda_graph
            decodes = request.model.format == DECODER
            resolved = "each decode step, by capture_decode" if decodes else "captured by bind()"
            if execution.cuda_graph == "require":
                rest = "what cannot be captured is refused, apart from the first token of a text"
                reason = rest if decodes else "bind() captures or raises"
                builder.add("execution.cuda_graph", resolved, "enforced", reason)
            else:
                rest = "what cannot be captured runs eagerly, and explain() says why"
                reason = rest if decodes else "captured where the model can be; otherwise the binding says why not"
                builder.add("execution.cuda_graph", resolved, "advisory", reason)
        else:
            builder.add("execution.cuda_graph", "-", "unsupported", "the CPU has no CUDA graphs", _ON_CUDA)
    builder.add(
        "execution.memory.pool", "-", "unsupported", "PyTorch's own allocator serves the model", "use pool: engine"
    )
    builder.add(
        "execution.static_shape",
        "the program's own shapes",
        "enforced" if _fixed(request) else "advisory",
        "every input has a fixed shape"
        if _fixed(request)
        else "the program takes several sizes; bind() fixes them for one binding",
    )
    return fields


def _fixed(request: Request) -> bool:
    return all(isinstance(dim, int) for info in request.model.inputs for dim in info.shape or (None,))


#: What a key is resolved to that leaves the choice to PyTorch.
PYTORCH_CHOICE = "PyTorch's choice"

#: What becomes of a key for an operation that the model does not have.
ABSENT = "-"
#: Backends of this library by the kind of device that they compute on; those of plugins are not listed.
_DEVICES = {"cpu": "cpu", "null": "cpu", "cuda_raw": "cuda", "cublas": "cuda", "cudnn": "cuda"}
#: Words that mean a kernel of PyTorch's own. As `xpuruntime.pytorch.dispatch.route.NATIVE_NAMES`, which needs PyTorch:
#: a plan is made from facts alone.
NATIVE = {
    "matmul": ("torch", "inductor", "torch.mm"),
    "attention": (
        "torch",
        "inductor",
        "torch.sdpa",
        "flash_v2",
        "torch.flash",
        "efficient",
        "torch.efficient",
        "cudnn",
        "torch.cudnn",
        "math",
        "torch.math",
    ),
    "layer_norm": ("torch", "inductor", "torch.layer_norm"),
    "rms_norm": ("torch", "inductor", "torch.rms_norm"),
    **{op: ("torch", "inductor", f"torch.{op}") for op in ("conv", *TENSOR_OPS)},
}
_CUDA_ALONE = ("cudnn", "torch.cudnn", "efficient", "torch.efficient")


def resolve_kernels(request: Request, builder: ControlBuilder, *, compiled: bool) -> None:
    """Add the control of every kernel key."""
    policy = request.policy.kernels
    cuda = request.device.startswith("cuda")
    present = {op for node in request.model.nodes if (op := operation_of(node)) is not None}
    if request.model.format == DECODER:  # which of them it calls is seen when it runs
        present = set(OPS)
    uncovered = uncovered_calls(request)
    for op, kernel_names in policy.preferences.items():
        key = f"kernels.{op}"
        if op not in present:
            _absent(builder, key, (op,), _tuple(kernel_names), written_out(request.model.nodes))
        else:
            _add(builder, key, (op,), _tuple(kernel_names), uncovered.get(key), cuda=cuda, compiled=compiled)
    placed = placed_rules(policy, request.model.nodes)
    for index, rule in enumerate(policy.rules):
        key = f"kernels.rules[{index}]"
        if rule.use is None or rule.precision is not None:
            reason = "the torch engine converts a program as a whole; it keeps no operator in another precision"
            builder.add(key, "-", "unsupported", reason)
            continue
        if rule.match.node is not None and not any(source == key for _, source in placed):
            reason = "no operator in a module, of an operation that kernels are chosen for, has such a name"
            builder.add(key, "-", "unsupported", reason, "correct match.node, or name the module by match.module")
            continue
        why, fix = policy.compiled_rules.rules[index].lacking_sizes()
        if why:
            builder.add(key, "-", "advisory", f"it can match no call: {why}", fix)
            continue
        ops = [op for op in OPS if op in (rule.ops_of_kernels() or {rule.match.op})]
        if not present.intersection(ops):
            named = [op for op in ops if op in computed_by(rule.use)] or ops
            _absent(builder, key, named, _tuple(rule.use), written_out(request.model.nodes))
            continue
        called = [op for op in ops if op in present]
        _add(builder, key, called, _tuple(rule.use), uncovered.get(key), cuda=cuda, compiled=compiled)
    if policy.auto_strategy == "best_performance":
        builder.add(
            "kernels.auto_strategy",
            "best_performance",
            "advisory",
            "where the policy leaves the choice, calls are measured while the model warms up",
        )
    else:
        builder.add("kernels.auto_strategy", "first_supported", "enforced", "a free choice is PyTorch's own")


def _absent(
    builder: ControlBuilder,
    key: str,
    ops: Sequence[str],
    kernel_names: tuple[str, ...],
    nodes_by_op: Mapping[str, Sequence[str]],
) -> None:
    """Add the control of a key for operations of which the model has no call: one is written out, or none is found."""
    written = next((op for op in ops if op in nodes_by_op), None)
    if kernel_names[0] == "auto":
        builder.add(key, PYTORCH_CHOICE, "enforced", "auto leaves the choice to PyTorch")
    elif written is not None:
        where = nodes_by_op[written][0]
        reason = f"the model writes {written} out (at {where!r}), which is no call that a kernel could serve"
        builder.add(key, ABSENT, "unsupported", reason, f"call the function of PyTorch for {written}")
    else:
        level: Enforceability = "advisory" if kernel_names[-1] == "auto" else "unsupported"
        builder.add(key, ABSENT, level, *absence(" or ".join(ops), nodes_by_op))


def _add(
    builder: ControlBuilder,
    key: str,
    ops: Sequence[str],
    kernel_names: tuple[str, ...],
    uncovered: UncoveredCalls | None,
    *,
    cuda: bool,
    compiled: bool,
) -> None:
    if kernel_names[0] == "auto":
        builder.add(key, PYTORCH_CHOICE, "enforced", "auto leaves the choice to PyTorch")
        return
    reasons: dict[str, str] = {}
    served: list[str] = []
    for kernel_name in kernel_names:
        why = [why_not(op, kernel_name, cuda=cuda) for op in ops]
        if all(why):
            reasons[kernel_name] = why[0]
        else:
            served.append(kernel_name)
    if not served:
        text = "; ".join(f"{kernel_name}: {reason}" for kernel_name, reason in reasons.items())
        builder.add(key, "-", "unsupported", text, "name another kernel (`xrt kernels` lists them)")
    elif uncovered is not None and uncovered.alone:
        builder.add(key, "-", "unsupported", uncovered.reason, uncovered.fix)
    elif compiled:
        reason = (
            "calls of the compiled program are decided one by one, but what the compiler fuses, such as norms, is no "
            "call any more"
        )
        if uncovered is not None:
            reason += f"; and {uncovered.reason}"
        builder.add(key, ", ".join(served), "advisory", reason, "state mode: eager for the torch engine")
    elif uncovered is not None:
        reason = f"each other call is served by it, but {uncovered.reason}"
        builder.add(key, ", ".join(served), "advisory", reason, uncovered.fix)
    else:
        reason = "each call is served by it, instead of PyTorch's own kernel; the evidence says which kernel ran"
        if reasons:
            reason += f". Not here: {'; '.join(f'{kernel_name}: {text}' for kernel_name, text in reasons.items())}"
        builder.add(key, ", ".join(served), "enforced", reason)


def why_not(op: str, kernel_name: str, *, cuda: bool) -> str:
    """Return why a kernel can serve no call of an operation on this device; empty where it may."""
    from xpuruntime.ops.call_context import kernel_ids, prepare

    if kernel_name == "auto":
        return ""
    if kernel_name in NATIVE[op]:
        return f"{kernel_name} runs on CUDA" if kernel_name in _CUDA_ALONE and not cuda else ""
    prepare()
    name = kernel_name.partition("@")[0]
    ids = kernel_ids(op, name)
    # What this build lacks, such as CUDA's, is known all the same.
    known = ids or [
        kernel_id
        for kernel_id, (ops, _) in KERNEL_IDS.items()
        if op in ops and name in (kernel_id, *kernel_id.split("."))
    ]
    kind = "cuda" if cuda else "cpu"
    if known and all(_DEVICES.get(kernel_id.partition(".")[0], kind) != kind for kernel_id in known):
        return f"{kernel_name} does not run on {kind}"
    if not ids:
        return f"there is no kernel {kernel_name} for {op}{question(misspelt_kernel((kernel_name,), op))}"
    return ""


def _tuple(kernel_names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)
