# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reader of models of PyTorch: ``.pt2`` files and modules, as a `ModelInfo`."""

from __future__ import annotations

import hashlib
import inspect
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xpuruntime.engines.arrays import torch_dtype_name
from xpuruntime.engines.model.facts import NodeInfo, TensorInfo
from xpuruntime.engines.model.file import refuse
from xpuruntime.engines.model.info import ModelInfo
from xpuruntime.engines.torch.names import op_name
from xpuruntime.engines.torch.program.archive import check_archive, check_sizes
from xpuruntime.engines.torch.program.sources import ExportedSource, ModuleSource, given_names, leaves, reading, spelled
from xpuruntime.engines.torch.uncovered_calls import width_by_products
from xpuruntime.errors import InputError, ModelError
from xpuruntime.evidence.metadata import LOCK_KEY
from xpuruntime.files.paths import folder_of, kind_of
from xpuruntime.runtime.packages import install_command

_EXPORT = "export it again with torch.export.save(torch.export.export(module, args), path)"


def inspect_program(path: str, *, trust: bool = False) -> ModelInfo:
    """Read an exported program."""
    file = Path(path)
    kind = kind_of(path)
    if kind != "file":
        raise refuse(
            path, "there is no such file" if kind == "missing" else f"it is no file ({kind})", "check the path"
        )
    _need_torch(path)
    facts = file.stat()
    names = check_sizes(path)
    if any("/aotinductor/" in name for name in names):
        fix = "give the exported program that the package was compiled from"
        raise refuse(path, "it is a package compiled by AOTInductor, which no policy can reach into", fix)
    if any(name.endswith("/data.pkl") for name in names) and not any("/models/" in name for name in names):
        raise refuse(path, "it is a checkpoint of PyTorch, as torch.save writes it, and no exported program", _EXPORT)
    if not trust:
        check_archive(path)
    import torch

    with reading(path, _EXPORT), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's about buffers of the archive that it reads from
        program = torch.export.load(path)
        return _info(program, path, facts.st_size, facts.st_mtime_ns, _carried(file))


def _carried(file: Path) -> dict[str, str]:
    texts = {}
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            key = name.partition("/extra/")[2]
            if key.startswith("xpuruntime."):
                texts[key] = archive.read(name).decode()
    return texts


def _info(program: Any, path: str, size: int, mtime_ns: int, metadata: dict[str, str]) -> ModelInfo:
    import torch

    from xpuruntime.pytorch._private_api import pytree
    from xpuruntime.pytorch.exporter.export_module import node_names, program_digest
    from xpuruntime.pytorch.exporter.exported import written_state

    signature = program.graph_signature
    user_inputs = set(filter(None, (input_ if isinstance(input_, str) else None for input_ in signature.user_inputs)))
    # a session copies inputs that are written
    changed = [name for name in written_state(program) if name not in user_inputs]
    if changed:
        fix = "export the module without in-place state"
        raise refuse(path, f"it changes {changed[0]!r} when it runs, so two runs at once would disturb each other", fix)
    placed = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    taken = []
    for spec in signature.input_specs:
        if spec.kind.name == "USER_INPUT" and not hasattr(spec.arg, "value"):
            value = placed[spec.arg.name].meta["val"]
            if not isinstance(value, torch.Tensor):
                raise refuse(path, f"its input {spec.arg.name!r} is no tensor", "export it with tensors as inputs")
            taken.append((spec.arg.name, value))
    spec = program.call_spec.out_spec
    output = next(node for node in program.graph.nodes if node.op == "output")
    values = [getattr(arg, "meta", {}).get("val") for arg in output.args[0]]
    results = leaves(pytree.tree_unflatten(values[-spec.num_leaves :], spec), path)
    spell = spelled((*taken, *results), given_names(metadata, path))
    inputs = tuple(_tensor(name, value, spell, program.range_constraints) for name, value in taken)
    outputs = tuple(_tensor(name, value, spell) for name, value in results)
    names = node_names(program)
    nodes = tuple(
        NodeInfo(
            name=names[node.name],
            op=op_name(node.target),
            domain="torch",
            inputs=tuple(input_.name for input_ in node.all_input_nodes),
            outputs=(node.name,),
            by_products=width_by_products(node),
        )
        for node in program.graph.nodes
        if node.op == "call_function"
    )
    source = ExportedSource(program, tuple(i.name for i in inputs), tuple(o.name for o in outputs), path, names)
    return ModelInfo(
        path=path,
        size=size,
        mtime_ns=mtime_ns,
        inputs=inputs,
        outputs=outputs,
        nodes=nodes,
        ops=_count(nodes),
        opsets={"torch": 1},
        producer=f"torch {torch.__version__}",
        ir_version=0,
        weights=_weights(program.state_dict.values()),
        format="pt2",
        base_dir=folder_of(path),
        source=source,
        metadata=metadata,
        weights_digest=program_digest(program) if LOCK_KEY in metadata else None,
    )


def inspect_module(module: Any, example_inputs: Mapping[str, Any] | Sequence[Any] | None) -> ModelInfo:
    """Describe a module by running it once on example inputs."""
    import torch

    where = f"<{type(module).__qualname__}>"
    if example_inputs is None:
        msg = f"{where} is a module, whose inputs are not known. Fix: pass example_inputs=(x, ...) or {{name: x}}"
        raise InputError(msg)
    if module.training:
        raise refuse(where, "it is in training mode: dropout and batch norm would run as in training", "call .eval()")
    if isinstance(module, torch.jit.ScriptModule):
        fix = "give the module that it was made from, or export that with torch.export"
        raise refuse(where, "it is compiled by TorchScript, which no policy can reach into", fix)
    keyword, examples = _examples(module, example_inputs, where)
    devices = {str(t.device) for t in (*module.parameters(), *module.buffers(), *examples.values())}
    if len(devices) > 1:
        named = ", ".join(sorted(devices))
        raise refuse(where, f"its parameters, buffers and example inputs are on {named}", "put them on one device")
    device = next(iter(devices), "cpu")
    names = tuple(examples)
    source = ModuleSource(
        module, keyword=keyword, inputs=names, outputs=(), examples=examples, device=device, where=where
    )
    from xpuruntime.engines.torch.program.recording import record

    with reading(where, "pass example_inputs that it runs on"):
        call = (lambda: module(**examples)) if keyword else (lambda: module(*examples.values()))
        result, nodes = record(module, call)
        results = leaves(result, where)
    source.outputs = tuple(name for name, _ in results)
    state = [*_state(module, hashlib.sha256())]
    return ModelInfo(
        path=where,
        size=sum(t.numel() * t.element_size() for _, t in state),
        mtime_ns=0,
        inputs=tuple(
            TensorInfo(name=n, dtype=torch_dtype_name(t.dtype), shape=(None,) * t.dim()) for n, t in examples.items()
        ),
        outputs=tuple(TensorInfo(name=n, dtype=torch_dtype_name(t.dtype), shape=(None,) * t.dim()) for n, t in results),
        nodes=nodes,
        ops=_count(nodes),
        opsets={"torch": 1},
        producer=f"torch {torch.__version__}",
        graph_name=type(module).__qualname__,
        ir_version=0,
        weights=_weights(t for _, t in state),
        format="torch",
        source=source,
        digest=_digest(module),
    )


def _examples(module: Any, example_inputs: Any, where: str) -> tuple[bool, dict[str, Any]]:
    import torch

    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    takes = inspect.signature(module.forward)
    parameters = [
        p.name
        for p in takes.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if hasattr(example_inputs, "keys"):
        keyword, examples = True, dict(example_inputs)
    else:
        keyword = False
        names = [parameters[i] if i < len(parameters) else f"input_{i}" for i in range(len(example_inputs))]
        examples = dict(zip(names, example_inputs, strict=True))
    for name, value in examples.items():
        if not isinstance(value, torch.Tensor):
            msg = f"example input {name!r} of {where} is a {type(value).__name__}. Fix: pass a torch tensor"
            raise InputError(msg)
    try:
        takes.bind(**examples) if keyword else takes.bind(*examples.values())
    except TypeError as error:
        msg = (
            f"example_inputs do not fit forward({', '.join(parameters)}) of {where}: {error}; got {', '.join(examples)}"
        )
        raise InputError(msg) from None
    return keyword, examples


def _tensor(name: str, value: Any, spell: Callable[[Any], str], ranges: Mapping[Any, Any] | None = None) -> TensorInfo:
    shape = tuple(int(d) if isinstance(d, int) else spell(d) for d in value.shape)
    limits = tuple(None if isinstance(d, int) else _limit(d, ranges or {}) for d in value.shape)
    return TensorInfo(name=name, dtype=torch_dtype_name(value.dtype), shape=shape, limits=limits if any(limits) else ())


def _limit(size: Any, ranges: Mapping[Any, Any]) -> tuple[int, int] | None:
    range_ = ranges.get(size.node.expr)
    if range_ is None:
        return None
    least, most = str(range_.lower), str(range_.upper)
    return int(least) if least.isdigit() else 0, int(most) if most.isdigit() else 2**63 - 1


def _count(nodes: Iterable[NodeInfo]) -> dict[str, int]:
    return dict(sorted(Counter(f"torch:{node.op}" for node in nodes).items()))


def _weights(tensors: Iterable[Any]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[torch_dtype_name(tensor.dtype)] += tensor.numel()
    return dict(counts.most_common())


def _digest(module: Any) -> str:
    import torch

    digest = hashlib.sha256(type(module).__qualname__.encode())
    for name, tensor in _state(module, digest):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b""))
    return digest.hexdigest()


def _state(module: Any, digest: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a module by name, those in packed weights too; what else it holds goes into `digest`."""
    import torch

    for name, tensor in module.state_dict().items():
        for index, part in enumerate(tensor if isinstance(tensor, tuple) else (tensor,)):
            where = f"{name}[{index}]" if isinstance(tensor, tuple) else name
            if isinstance(part, torch.Tensor) and part.is_quantized:
                digest.update(f"{where} {part.q_scale() if part.qscheme() == torch.per_tensor_affine else ''}".encode())
                yield where, part.int_repr()
            elif isinstance(part, torch.Tensor):
                yield where, part
            else:
                digest.update(f"{where} {part!r}".encode())


def _need_torch(path: str) -> None:
    if "torch" in sys.modules:
        return
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        msg = (
            f"cannot use the model {path!r}: it is a program of PyTorch, which is not installed. "
            f"Fix: {install_command('torch')}."
        )
        raise ModelError(msg)
