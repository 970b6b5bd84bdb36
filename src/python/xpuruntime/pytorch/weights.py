# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Weights of linear layers: how they are stored, in which type they compute, and whether that is as a policy claims.

Stored bytes and computed products are two facts: int8 weights may be converted to floats before each product.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from xpuruntime.errors import InputError, UnsupportedOperationError, warn
from xpuruntime.policies import Policy
from xpuruntime.policies.call_facts import Glob
from xpuruntime.printable import bytes_text
from xpuruntime.pytorch.dispatch import step_cost
from xpuruntime.pytorch.dispatch.context import DTYPES, thread_policy

if TYPE_CHECKING:
    from xpuruntime.policies.execution_policy import WeightsPolicy
    from xpuruntime.pytorch.explanation.summary import Row

#: Operators of products that tell their type by name.
_COMPUTES = {"aten::_int_mm": "int8", "aten::_weight_int4pack_mm": "float", "aten::_weight_int8pack_mm": "float"}
_FLOATS = ("fp64", "fp32", "fp16", "bf16")
#: Storage and computing type to the least compute capability of a CUDA device that has the units.
_UNITS = {("fp8", "fp8"): (8, 9), ("nvfp4", "fp4"): (10, 0), ("int4", "float"): (8, 0)}
_NAMED = 4
#: Bytes of bf16, and by how much a device may read faster than it was measured to copy.
_BF16 = 2
_MARGIN = 1.2
#: Weights have to be so many times as large as the L2 cache: what is in it comes from no memory.
_CACHES = 4
#: Rows of a product up to which the time is that of its weights.
_ROWS = 32
#: Name of the rows of replays, and how often a product in bf16 is timed.
_GRAPH, _TIMED = "CUDA graph", 11
#: Rows that `aten::_int_mm` has at least on CUDA devices.
_LEAST_INT8 = 17
#: Layers of PyTorch whose parameters are no matrices of a product, nor are those of classes made of them.
_OWN = (torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.modules.conv._ConvNd, torch.nn.RNNBase)
_TORCHAO = "pip install 'xpuruntime[torchao]'"


class LinearWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of one linear layer, or of another module that multiplies by a matrix.

    Attributes
    ----------
    module : str
        Of a module that is no ``torch.nn.Linear``, such as one of experts, with the name of the parameter behind it.
    storage : str
        Type of the stored values: ``"int8"``, ``"int4"``, ``"fp8"``, ``"nvfp4"``, or that of a plain tensor, such as
        ``"bf16"``; else the name of its class.
    bits : float
        Stored bits of one value, without scales.
    group : int or None
        Values of a row that share one scale; ``None`` where the weights do not tell.
    compute : str
        Type of the operands of the products that ran: ``"float"``, ``"int8"``, ``"fp8"`` or ``"fp4"``, several
        separated by commas; ``"unobservable"`` where none was seen in the module.
    operators : tuple of str
        Operators of these products.
    """

    module: str
    storage: str
    bits: float
    group: int | None
    compute: str
    operators: tuple[str, ...]


class WeightTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Whether layers took less time than reading their weights in bf16 would, which no emulation does.

    Attributes
    ----------
    verdict : {"proved", "inconclusive", "unobservable"}
        ``"inconclusive"``: they took as long or longer, which kernels that do read less can do, too.
    reason : str
    layers_us : float
        Work of the device inside of all counted layers in one forward, in microseconds; of a captured step, all its
        work. 0 where that is not known.
    floor_us : float
        Reading their weights in bf16 at 1.2 times the bandwidth of a copy, measured on this device.
    bf16_us : float
        Where the verdict is ``"inconclusive"``: PyTorch's products by bf16 weights of these shapes, of as many rows, of
        one beside a captured step, measured on this device.
    """

    verdict: Literal["proved", "inconclusive", "unobservable"]
    reason: str
    layers_us: float = 0.0
    floor_us: float = 0.0
    bf16_us: float = 0.0


def traffic_of(
    claimed: WeightsPolicy, root: torch.nn.Module, rows: Iterable[Row], modules: Mapping[str, int], replays: int = 0
) -> WeightTraffic:
    """Compare the time of linear layers with the least time that bf16 weights would take.

    Parameters
    ----------
    claimed : WeightsPolicy
    root : torch.nn.Module
    rows : iterable of Row
        Of an explanation.
    modules : mapping of str to int
        Nanoseconds of device work that was launched inside of each module; what turns weights into floats is in it.
    replays : int
        How many captured steps of the model were replayed. Then they are judged, whole: the layers are those of which
        products were seen beside them, as of the prompt.
    """

    def unknown(reason: str) -> WeightTraffic:
        return WeightTraffic(verdict="unobservable", reason=reason)

    kept = [Glob(pattern) for pattern in claimed.exclude]
    layers = {
        name: layer
        for name, layer in root.named_modules()
        if isinstance(layer, torch.nn.Linear) and not any(glob(name) for glob in kept)
    }
    device = next((layer.weight.device for layer in layers.values()), torch.device("cpu"))
    if device.type != "cuda":
        return unknown("only times of CUDA devices tell how much was read")
    counts, widest, rows = dict.fromkeys(layers, 0), 0, list(rows)
    for row in rows:
        if row.module in counts and _compute_of(row):
            counts[row.module] += row.count
            widest = max(widest, _rows_of(row))
    if replays:
        layers = {name: layer for name, layer in layers.items() if counts[name]}
        graphs = [row for row in rows if row.operator == _GRAPH and row.device != "cpu" and row.time_us]
        if not layers or sum(row.count for row in graphs) != replays:
            return unknown(
                "beside captured steps, no product of a layer was seen, or replays of other CUDA graphs were"
            )
    size = _BF16 * sum(layer.in_features * layer.out_features for layer in layers.values())
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    if size < _CACHES * cache:
        return unknown(f"in bf16 they have {bytes_text(size)}, and the L2 cache has {bytes_text(cache)}")
    if replays:
        spent = sum(row.time_us for row in graphs) / replays
        what = f"a captured step took {spent:,.1f} us with all that is in it"
    else:
        if widest > _ROWS:
            return unknown(f"products have more than {_ROWS} rows, such as those of prompts")
        if len(set(counts.values())) != 1 or not all(map(modules.get, layers)):
            return unknown("work of the layers was not seen equally often, as in compiled code")
        spent = sum(modules[name] for name in layers) / 1e3 / next(iter(counts.values()))
        what = f"linear layers took {spent:,.1f} us a forward"
    floor = size / (_MARGIN * _copy_bandwidth(device, _CACHES * cache)) * 1e6
    reason = f"{what}, and reading their weights in bf16 takes {floor:,.1f} us or more"
    if spent < floor:
        return WeightTraffic(verdict="proved", reason=reason, layers_us=spent, floor_us=floor)
    usual = _bf16_us(layers.values(), 1 if replays else widest, device)
    slower = "slower than bf16 here: " if spent > usual and not replays else ""
    return WeightTraffic(
        verdict="inconclusive", reason=f"{slower}{reason}; their products in bf16 take {usual:,.1f} us",
        layers_us=spent, floor_us=floor, bf16_us=usual,
    )  # fmt: skip


def _bf16_us(layers: Iterable[torch.nn.Linear], rows: int, device: torch.device) -> float:
    """Return what products by bf16 weights take on a device, whose cache has nothing of them."""
    total = 0.0
    for (outputs, inputs), count in Counter((layer.out_features, layer.in_features) for layer in layers).items():
        weight = torch.zeros(outputs, inputs, dtype=torch.bfloat16, device=device)
        x = weight.new_zeros(rows, inputs)
        with torch.no_grad(), thread_policy(None):
            product = functools.partial(torch.nn.functional.linear, x, weight)
            total += count * step_cost.time_on_cuda(product, device, _TIMED)[1]
    return total * 1e6


def _rows_of(row: Row) -> int:
    operand = next((shape for shape in row.shapes if len(shape) > 1), (0, 0))
    return math.prod(operand[:-1])


def _copy_bandwidth(device: torch.device, size: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    with torch.cuda.device(device):
        for _ in range(10):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            best = max(best, 2 * size / (begin.elapsed_time(end) / 1e3))
    return best


def weights_of(root: torch.nn.Module, rows: Iterable[Row] = ()) -> tuple[LinearWeights, ...]:
    """Return the weights of the products of a model, and by which of the rows of an explanation they computed."""
    products: dict[str, dict[str, str]] = {}
    for row in rows:
        if kind := _compute_of(row):
            products.setdefault(row.module, {})[row.operator] = kind
    weights = []
    for name, module, weight in _matrices(root):
        ran = products.get(module, {})
        storage, bits, group = _stored(weight)
        kinds = ", ".join(sorted(set(ran.values()))) or "unobservable"
        weights.append(
            LinearWeights(
                module=name, storage=storage, bits=bits, group=group, compute=kinds, operators=tuple(sorted(ran))
            )
        )
    return tuple(weights)


def _matrices(root: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield a name, the module, and the matrix: of linear layers, and of whatever else a model has by itself."""
    for name, module in root.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield name, name, module.weight
        elif not isinstance(module, _OWN) and not _is_of_pytorch(module):
            for key, tensor in module.named_parameters(recurse=False):
                if sum(size > 1 for size in tensor.shape) > 1 and tensor.shape[0] > 1:
                    yield f"{name}.{key}".lstrip("."), name, tensor


def _is_of_pytorch(module: torch.nn.Module) -> bool:
    is_attention = isinstance(module, torch.nn.MultiheadAttention)  # which has matrices of its own
    return type(module).__module__.partition(".")[0] == "torch" and not is_attention


def _compute_of(row: Row) -> str:
    name = row.operator.partition(".")[0]
    if name in _COMPUTES or name == "aten::_weight_int4pack_mm_for_cpu":
        return _COMPUTES.get(name, "float")
    if name == "aten::_scaled_mm":
        return "fp8" if any(kind.startswith(("fp8", "float8")) for kind in row.dtypes) else "fp4"
    return "float" if row.op == "matmul" and row.dtypes and row.dtypes[0] in _FLOATS else ""


def _stored(weight: torch.Tensor) -> tuple[str, float, int | None]:
    if hasattr(weight, "to_local"):  # of several ranks
        weight = weight.to_local()
    if not hasattr(weight, "__tensor_flatten__"):
        plain = DTYPES.get(weight.dtype, str(weight.dtype).removeprefix("torch."))
        return plain, 8.0 * weight.element_size(), None
    parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    data = max(
        (part for part in parts if isinstance(part, torch.Tensor)), key=lambda part: part.numel(), default=weight
    )
    bits = 8.0 * data.numel() * data.element_size() / max(weight.numel(), 1)
    block = getattr(weight, "block_size", None)
    group = int(block[-1]) if isinstance(block, (list, tuple)) and block else block if isinstance(block, int) else None
    kind, target = type(weight).__name__, str(getattr(weight, "target_dtype", ""))
    if "NVFP4" in kind:
        return "nvfp4", bits, group
    if "float8" in str(data.dtype):
        return "fp8", bits, group
    if "Int4" in kind or target.endswith("int4"):
        return "int4", bits, group
    return ("int8" if data.dtype == torch.int8 and not target.endswith(("int1", "int2", "int3")) else kind), bits, group


def deviations(
    claimed: WeightsPolicy, weights: Iterable[LinearWeights], placed: Iterable[LinearWeights] = (), *, ran: bool
) -> tuple[str, ...]:
    """Return a sentence for each claim that does not hold; what computed is compared where the model `ran`.

    Of weights that were `placed` into the model, those count that were taken out again.
    """
    weights = list(weights)
    there = {(weight.module, weight.storage, weight.bits, weight.group) for weight in weights}
    kept = [Glob(pattern) for pattern in claimed.exclude]
    counted = [weight for weight in weights if not any(glob(weight.module) for glob in kept)]
    idle = _idle(claimed, [weight.module for weight in weights])
    if not counted:
        return (*idle, "execution.weights is claimed, and the model has no linear layer that it is of")
    passing = [
        msgspec.structs.replace(weight, module=f"{weight.module}, for a while")
        for weight in placed
        if not any(glob(weight.module) for glob in kept)
        and (weight.module, weight.storage, weight.bits, weight.group) not in there
    ]
    wrong = (*_differences(claimed, counted, ran=ran), *_differences(claimed, passing, ran=False))
    return (*idle, *filter(None, wrong))


def _idle(claimed: WeightsPolicy, names: Iterable[str]) -> list[str]:
    names = list(names)
    return [
        f"execution.weights.exclude has {pattern!r:.80}, which is the name of no linear layer"
        for pattern in claimed.exclude
        if not any(map(Glob(pattern), names))
    ]


def _differences(claimed: WeightsPolicy, counted: list[LinearWeights], *, ran: bool) -> Iterator[str]:
    most = {"int4": 4.0, "nvfp4": 4.0}.get(str(claimed.storage), 8.0)
    stored = [weight for weight in counted if weight.storage != claimed.storage or weight.bits > most]
    how = {weight.module: f"{weight.storage} of {weight.bits:g} bits" for weight in stored}
    yield _sentence("storage", claimed.storage, how, len(counted))
    groups = {weight.module: str(weight.group) for weight in counted if claimed.group not in (None, weight.group)}
    yield _sentence("group", claimed.group, groups, len(counted))
    if ran and claimed.compute is not None:
        computed = {
            weight.module: weight.compute
            for weight in counted
            if weight.compute not in (claimed.compute, "unobservable")
        }
        yield _sentence("compute", claimed.compute, computed, len(counted))
        unseen = {weight.module: weight.compute for weight in counted if weight.compute == "unobservable"}
        sentence = _sentence("compute", claimed.compute, unseen, len(counted))
        yield f"inconclusive: {sentence}" if sentence else ""


def _sentence(key: str, claimed: Any, differing: dict[str, str], count: int) -> str:
    if not differing:
        return ""
    named = ", ".join(f"{module or 'the model'} ({value})" for module, value in list(differing.items())[:_NAMED])
    rest = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    return f"execution.weights.{key} is {claimed}, and {len(differing)} of {count} linear layers differ: {named}{rest}"


def noting_placed(root: torch.nn.Module, placed: list[LinearWeights]) -> contextlib.ExitStack:
    """Take note, until it is closed, of weights that are put into a model, also if they are taken out again.

    They count as they are when they are put there. What goes past ``setattr`` of a module is not seen.
    """

    def note(parent: torch.nn.Module, name: str, added: Any) -> None:
        path = next((path for path, module in root.named_modules() if module is parent), None)
        if path is None or added is None:
            return
        if isinstance(added, torch.nn.Module):
            found = [(f"{path}.{name}.{inner}".strip("."), weight) for inner, _, weight in _matrices(added)]
        else:
            found = [(path, added)] if isinstance(parent, torch.nn.Linear) and name == "weight" else []
        for module, weight in found:
            storage, bits, group = _stored(weight)
            placed.append(
                LinearWeights(
                    module=module, storage=storage, bits=bits, group=group, compute="unobservable", operators=()
                )
            )

    of = torch.nn.modules.module
    handles = contextlib.ExitStack()
    handles.callback(of.register_module_module_registration_hook(note).remove)
    handles.callback(of.register_module_parameter_registration_hook(note).remove)
    return handles


def check_storage(policy: Policy, root: torch.nn.Module | None, placed: Iterable[LinearWeights] = ()) -> None:
    """Compare what a policy claims of stored weights with those of a model; raises where it is strict, else warns."""
    claimed = policy.execution.weights
    if claimed.storage is None or policy.mode == "auto":
        return
    fix = (
        "call xpuruntime.pytorch.quantize(model, policy), or list modules that keep floats in execution.weights.exclude"
    )
    if root is None:
        wrong = ["execution.weights claims how a model stores its weights, and no model is given"]
        fix = "pass root=model to kernel_policy"
    else:
        wrong = [*_lacking(claimed, root), *deviations(claimed, weights_of(root), placed, ran=False)]
    if wrong and policy.mode == "strict":
        raise UnsupportedOperationError(f"{'; '.join(wrong)}. Fix: {fix}, or use mode: prefer", engine="torch")
    if wrong:
        warn(f"{'; '.join(wrong)}. Fix: {fix}")


def _lacking(claimed: WeightsPolicy, root: torch.nn.Module) -> Iterator[str]:
    """Yield why the device of a model cannot compute as claimed."""
    if (claimed.storage, claimed.compute) == ("int4", "int8"):
        yield "PyTorch has no product that reads int4 from 4 bits each and computes in int8"
        return
    need = _UNITS.get((str(claimed.storage), "float" if claimed.storage == "int4" else str(claimed.compute)))
    device = next((tensor.device for tensor in root.parameters()), torch.device("cpu"))
    if need is None:
        return
    here = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if here is None or here < need:
        has = "the CPU has none" if here is None else f"{device} has {here[0]}.{here[1]}"
        what = f"{claimed.storage} weights" + (f" computed in {claimed.compute}" if claimed.compute else "")
        yield f"{what} need a CUDA device of compute capability {need[0]}.{need[1]}, and {has}"


#: Sizes of groups that torchao has for a format; others have a scale a row.
_GROUPS = {"nvfp4": 16}


def quantize(model: torch.nn.Module, policy: Any) -> torch.nn.Module:
    """Quantize the linear layers of a model in place by torchao, as ``execution.weights`` of a policy states.

    Parameters
    ----------
    model : torch.nn.Module
    policy : Policy or what it can be made of
        States ``execution.weights.storage``; without ``compute``, products are computed in floats. ``group`` is of
        int4, 32 by default, and 16 of nvfp4.

    Returns
    -------
    torch.nn.Module
        The model.

    Raises
    ------
    InputError
        The policy states no storage, or a group that it does not have, or excludes a layer that was not found; or the
        model is none of PyTorch, has no layer that would be quantized, or one that is already.
    UnsupportedOperationError
        torchao is not installed, the device lacks the units, or the model has matrices outside of ``torch.nn.Linear``,
        such as those of experts, which torchao leaves as they are, and the policy does not exclude.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"quantize takes a torch.nn.Module, got a {type(model).__name__}")
    claimed = Policy.coerce(policy).execution.weights
    if claimed.storage is None:
        raise InputError("the policy states no execution.weights.storage. Fix: state weights: {storage: int8}")
    if wrong := next(_lacking(claimed, model), ""):
        raise UnsupportedOperationError(f"{wrong}. Fix: state weights: {{storage: int8}}", engine="torch")
    if claimed.group is not None and claimed.storage != "int4" and claimed.group != _GROUPS.get(claimed.storage):
        fix = "leave group out, or state storage: int4"
        raise InputError(f"execution.weights.group is {claimed.group}, and {claimed.storage} has none such. Fix: {fix}")
    kept = [Glob(pattern) for pattern in claimed.exclude]

    def is_quantized(layer: torch.nn.Module, name: str) -> bool:
        return isinstance(layer, torch.nn.Linear) and not any(glob(name) for glob in kept)

    _refuse_layers(claimed, model, {name for name, layer in model.named_modules() if is_quantized(layer, name)})
    try:
        with quiet_torchao():
            from torchao.quantization import quantize_

            config = _config(claimed)
    except ImportError as error:
        raise UnsupportedOperationError(
            f"quantize() needs torchao: {error}. Fix: {_TORCHAO}", engine="torch"
        ) from error
    if hasattr(config, "set_inductor_config"):  # of torch.compile for the whole process
        config.set_inductor_config = False
    quantize_(model, config, filter_fn=is_quantized)
    on_cuda = any(tensor.is_cuda for tensor in model.parameters())
    if on_cuda and claimed.storage == "int8" and claimed.compute != "int8":
        msg = "int8 weights that compute in floats are slower than bf16 here: a captured step took 9.7 times as long"
        fix = "state weights: {storage: int4}, or {storage: fp8, compute: fp8} from compute capability 8.9"
        warn(f"{msg} on an H200; they save memory alone. Fix: {fix}")
    return model


#: Logger to messages of torchao's import that no user can fix: libraries for CUDA devices do not load on a machine
#: without one, and torchao registers its enumerations as an older PyTorch wants it.
_OF_IMPORTS = {
    "torchao": r"Failed to load .*\.so: ",
    "torch.utils._pytree": r".* is an Enum subclass and is now natively",
}


@contextlib.contextmanager
def quiet_torchao() -> Iterator[None]:
    """Import torchao, or what imports it, such as transformers, without its messages; on CUDA devices with them."""

    def is_unknown(record: logging.LogRecord) -> bool:
        return re.match(_OF_IMPORTS[record.name], record.getMessage()) is None

    loggers = [] if torch.cuda.is_available() else [logging.getLogger(name) for name in _OF_IMPORTS]
    for logger in loggers:
        logger.addFilter(is_unknown)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_unknown)


def few_rows(model: torch.nn.Module, rows: int, device: torch.device) -> str:
    """Return why compiled products of a model cannot have so few rows on a device; empty where they can."""
    if rows >= _LEAST_INT8 or device.type != "cuda":
        return ""
    weights = (layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    if not any(getattr(weight, "act_quant_kwargs", None) and _stored(weight)[0] == "int8" for weight in weights):
        return ""
    msg = f"weights of int8 that compute in int8 need {_LEAST_INT8} rows or more on CUDA devices"
    return f"{msg}; fp8 that computes in fp8 does not"


def _refuse_layers(claimed: WeightsPolicy, model: torch.nn.Module, chosen: set[str]) -> None:
    """Refuse a model of which not all layers that a policy is of are there to be quantized."""
    matrices = {name: weight for name, _, weight in _matrices(model)}
    for idle in _idle(claimed, matrices):
        raise InputError(f"{idle}. Fix: name layers as model.named_modules() does, or leave it out")
    kept = [Glob(pattern) for pattern in claimed.exclude]
    rest = [name for name in matrices if name not in chosen and not any(glob(name) for glob in kept)]
    if rest:
        named = ", ".join(rest[:_NAMED]) + (f" and {len(rest) - _NAMED} more" if len(rest) > _NAMED else "")
        msg = f"torchao quantizes layers of torch.nn.Linear alone, and these would keep floats: {named}"
        parent, _, last = rest[0].rpartition(".")
        fix = f"list them in execution.weights.exclude, such as ['{'*.' if parent else ''}{last}']"
        raise UnsupportedOperationError(f"{msg}. Fix: {fix}", engine="torch")
    if not chosen:
        raise InputError("the model has no layer of torch.nn.Linear to quantize. Fix: exclude fewer, or another model")
    ready = next((name for name in sorted(chosen) if hasattr(matrices[name], "__tensor_flatten__")), None)
    if ready is not None:
        msg = f"{ready} is quantized already, as {_stored(matrices[ready])[0]}"
        raise InputError(f"{msg}. Fix: quantize the model as it was loaded, once")


def _config(claimed: WeightsPolicy) -> Any:
    from torchao import quantization

    if claimed.storage == "int8":
        dynamic = claimed.compute == "int8"
        return quantization.Int8DynamicActivationInt8WeightConfig() if dynamic else quantization.Int8WeightOnlyConfig()
    if claimed.storage == "int4":
        return quantization.Int4WeightOnlyConfig(
            group_size=claimed.group or 32, int4_packing_format="tile_packed_to_4d"
        )
    if claimed.storage == "fp8":
        dynamic = claimed.compute == "fp8"
        return (
            quantization.Float8DynamicActivationFloat8WeightConfig()
            if dynamic
            else quantization.Float8WeightOnlyConfig()
        )
    from torchao.prototype import mx_formats

    fp4 = claimed.compute == "fp4"
    return mx_formats.NVFP4DynamicActivationNVFP4WeightConfig() if fp4 else mx_formats.NVFP4WeightOnlyConfig()
