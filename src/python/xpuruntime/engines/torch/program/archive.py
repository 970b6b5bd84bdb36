# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Checks of untrusted `.pt2` archives: content that PyTorch would run, import, evaluate or unpack without end."""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from xpuruntime.engines.model.file import refuse
from xpuruntime.files.reading import unpacked_too_large

_AGAIN = "copy it or export it again with torch.export.save"
_TRUST = (
    "load it only if you trust who made it, with trust=True (on the command line --trust); or export it again from "
    "plain tensors"
)
#: Folders of an archive that hold pickles as a whole, and files that do in the format before PyTorch 2.8.
_PICKLES = ("data/sample_inputs/",)
_OLD_PICKLES = re.compile(r"serialized_(state_dict|constants|example_inputs)\.(pt|json)")
_OLD_PROGRAM = "serialized_exported_program.json"
_GLOBAL = re.compile(r"(?:GLOBAL|class|type|global) '?([\w.]+)")


def check_sizes(path: str) -> tuple[str, ...]:
    """Return the members' names of a ``.pt2`` file."""
    file = Path(path)
    with _whole(path):
        is_zip = zipfile.is_zipfile(file)
    if not is_zip:
        raise refuse(path, "it is no archive, so no exported program, or it is cut off", "export or copy it again")
    with _whole(path), zipfile.ZipFile(file) as archive:
        reason = unpacked_too_large(archive, file.stat().st_size)
        names = tuple(archive.namelist())
    if reason is not None:
        raise refuse(path, reason, _AGAIN)
    return names


def check_archive(path: str) -> None:
    """Refuse an archive of which loading would run code, or take time or memory without bound."""
    from xpuruntime.pytorch._private_api import archive_reader

    with _whole(path):
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if _OLD_PICKLES.fullmatch(member.filename):
                    _check_pickle(path, member.filename, archive.read(member))
                elif member.filename == _OLD_PROGRAM:
                    _check_json_program(path, member.filename, archive.read(member))
        reader = archive_reader(path)
        records = reader.get_all_records()

    def read(name: str) -> bytes:
        with _whole(path):
            record: bytes = reader.get_record(name)
        return record

    def size(name: str) -> int:
        with _whole(path):
            if hasattr(reader, "get_record_size"):
                return int(reader.get_record_size(name))
            return len(reader.get_record(name))  # PyTorch 2.11

    for name in records:
        if name.startswith("models/"):
            _check_json_program(path, name, read(name))
        elif name.startswith(_PICKLES):
            _check_pickle(path, name, read(name))
        elif name.startswith(("data/weights/", "data/constants/")):
            if name.endswith("_config.json"):
                _check_payloads(path, name, read, size, records)
            elif name.endswith(".pt"):
                _check_pickle(path, name, read(name))


def _check_payloads(
    path: str, name: str, read: Callable[[str], bytes], size: Callable[[str], int], records: list[str]
) -> None:
    """Check the table of weights or of constants: those that are pickles, and those without bytes."""
    folder = name.rpartition("/")[0]
    for weight, entry in _entries(path, name, read(name)):
        member = f"{folder}/{entry.get('path_name')}"
        base = member.rpartition("/")[2]
        if base.startswith(("opaque_obj", "custom_obj")):
            _untrusted(path, f"{weight!r} is a Python object ({member})")
        if member not in records:
            raise refuse(path, f"the data of {weight!r} is missing: it has no {member!r}", _AGAIN)
        if entry.get("use_pickle"):
            _check_pickle(path, member, read(member))
        elif not _holds(entry, size(member)):
            raise refuse(path, f"{weight!r} has no data and a size that is not 0", _AGAIN)


def _holds(entry: dict[str, Any], size: int) -> bool:
    """Say whether a member without bytes is for a tensor without elements: PyTorch makes zeros of any size else."""
    meta = entry.get("tensor_meta")
    sizes = meta.get("sizes") if isinstance(meta, dict) else None
    return size > 0 or (isinstance(sizes, list) and any(isinstance(s, dict) and s.get("as_int") == 0 for s in sizes))


def _entries(path: str, name: str, data: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    with _whole(path):
        table = json.loads(data)
    configs = table.get("config") if isinstance(table, dict) else None
    if not isinstance(configs, dict) or not all(isinstance(config, dict) for config in configs.values()):
        raise refuse(path, f"{name} is no table of tensors", _AGAIN)
    yield from configs.items()


def _check_json_program(path: str, name: str, data: bytes) -> None:
    with _whole(path):
        program = json.loads(data)
    try:
        check_program(program)
    except Unsafe as unsafe:
        _untrusted(path, f"{unsafe} ({name})")
    except RecursionError:
        raise refuse(path, f"{name} is nested too deeply", _AGAIN) from None


def _check_pickle(path: str, name: str, data: bytes) -> None:
    import torch

    if not data:
        return
    with _whole(path):
        packed = zipfile.is_zipfile(io.BytesIO(data))
    if packed:
        with _whole(path), zipfile.ZipFile(io.BytesIO(data)) as inner:
            reason = unpacked_too_large(inner, len(data))
        if reason is not None:
            raise refuse(path, f"{name}: {reason}", _AGAIN)
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:
        named = _GLOBAL.search(str(error))
        what = f"a pickle that names {named[1]}" if named else "a pickle of more than tensors and plain values"
        _untrusted(path, f"{name} is {what}")


def _untrusted(path: str, what: str) -> NoReturn:
    raise refuse(path, f"{what}, so loading it can run code of the file", _TRUST)


class _whole:  # noqa: N801 - reads as a statement
    """Turn what a damaged archive raises into a `ModelError`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not hasattr(error, "engine"):
            text = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
            raise refuse(self._path, f"the archive is damaged: {text}", _AGAIN) from None


#: Fields whose texts become names in the Python code of the graph.
_NAMES = frozenset({"name", "as_name"})
_NAME_LISTS = frozenset({"forward_arg_names"})
_NAME_TABLES = frozenset(
    {"tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values", "custom_obj_values"}
)
#: Fields that are never evaluated.
_PLAIN = frozenset({"metadata", "stack_trace", "guards_code", "as_string", "as_strings", "torch_version"})

#: What SymPy may call in the expression of a size.
_FUNCTIONS = frozenset(
    {
        "Abs", "Add", "And", "CeilDiv", "CeilToInt", "CleanDiv", "Eq", "Equality", "Float", "FloatPow", "FloatTrueDiv",
        "FloorDiv", "FloorToInt", "Ge", "GreaterThan", "Gt", "Identity", "Integer", "IntInfinity", "IntTrueDiv",
        "IsNonOverlappingAndDenseIndicator", "LShift", "Le", "LessThan", "Lt", "Max", "Min", "Mod", "ModularIndexing",
        "Mul", "Ne", "NegativeIntInfinity", "Not", "Or", "Piecewise", "Pow", "PowByNatural", "PythonMod", "RShift",
        "Rational", "RoundDecimal", "RoundToInt", "StrictGreaterThan", "StrictLessThan", "Symbol", "ToFloat",
        "TruncToFloat", "TruncToInt", "Unequality", "Where", "ceiling", "floor", "sqrt",
    }
)  # fmt: skip
_WORDS = frozenset({"True", "False", "true", "false", "oo", "int_oo", "nan", "zoo"})
_SYMBOL = re.compile(r"[a-z]{1,8}_?\d{1,6}")
_NUMBER = re.compile(r"-?\d{1,40}(\.\d{0,40})?(e[+-]?\d{1,3})?")
_LONGEST = 20_000
_LARGEST_POWER = 64
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Call, ast.Name, ast.Constant, ast.Tuple,
    ast.Load, ast.keyword, ast.operator, ast.unaryop, ast.cmpop, ast.boolop,
)  # fmt: skip

_OPERATORS = frozenset(
    {
        "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "index", "invert", "le", "lshift", "lt", "mod",
        "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv", "xor",
    }
)  # fmt: skip
#: Operators that reach for files of the machine.
_FILES = frozenset({"from_file", "from_file_"})
_TARGET = re.compile(r"torch\.ops\.(\w+)\.(\w+)(\.\w+)?")
_TORCH_FUNCTION = re.compile(
    r"torch\.(sym_\w+|_C\._set_grad_enabled|autograd\.grad_mode\.set_grad_enabled"
    r"|amp\.autocast_mode\._(enter|exit)_autocast|_functorch\.predispatch\.\w+"
    r"|export\.custom_ops\._call_custom_autograd_function_in_pre_dispatch"
    r"|fx\.experimental\.symbolic_shapes\.cast_symbool_to_symint_guardless)"
)
#: Modules in which a tree of arguments may look for the default of a dict.
_FACTORIES = frozenset({"builtins", "collections"})


class Unsafe(Exception):  # noqa: N818 - says what it found
    """A text that could run code, and where it stands."""


def check_program(program: Any) -> None:
    """Look through a serialized program."""
    if not isinstance(program, dict):
        raise Unsafe("the program is no object")
    ranges = program.get("range_constraints") or {}
    if not isinstance(ranges, dict):
        raise Unsafe("the ranges of its symbols are no object")
    for symbol in ranges:
        _check_expression(symbol)
    waiting: list[Any] = [program]
    while waiting:
        member = waiting.pop()
        if isinstance(member, list):
            waiting.extend(member)
            continue
        if not isinstance(member, dict):
            continue
        for key, value in member.items():
            if key in _PLAIN:
                continue
            if isinstance(value, str):
                _check_text(key, value)
            elif key in _NAME_LISTS:
                _check_names(key, value or ())
            elif key in _NAME_TABLES:
                _check_names(key, value or ())
                waiting.append(value)
            else:
                waiting.append(value)


def _check_text(key: str, text: str) -> None:
    if key in _NAME_LISTS:
        raise Unsafe(f"{key} is the text {_shown(text)}")
    if key in _NAMES:
        _check_names(key, (text,))
    elif key == "expr_str":
        _check_expression(text)
    elif key in ("target", "as_operator"):
        _check_target(text)
    elif key in ("in_spec", "out_spec"):
        _check_tree(text, 0)


def _check_names(key: str, names: Any) -> None:
    if not isinstance(names, (list, tuple, dict)):
        raise Unsafe(f"{key} is {_shown(names)}, no names")
    for name in names:
        if not isinstance(name, str):
            raise Unsafe(f"{key} has {_shown(name)}, no name")
        if name and not (name.isascii() and name.isidentifier()):
            raise Unsafe(f"the {key} {_shown(name)} is no identifier")


def _check_target(text: str) -> None:
    match = _TARGET.fullmatch(text)
    if match is not None and match[2] not in _FILES:
        return
    module, _, name = text.rpartition(".")
    if module == "_operator" and name in _OPERATORS:
        return
    if module == "math" and name.isidentifier():
        return
    if text == "round" or text == "builtins.round" or _TORCH_FUNCTION.fullmatch(text):
        return
    raise Unsafe(f"the operator {_shown(text)} is none that a model has")


def _check_expression(text: str) -> None:
    problem = f"the size {_shown(text)} is no plain arithmetic"
    if not text.isascii() or "\n" in text or len(text) > _LONGEST:
        raise Unsafe(problem)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unsafe(problem) from None
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    texts = {id(node.args[0]) for node in ast.walk(tree) if _is_called(node, ("Symbol", "Float")) and node.args}
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise Unsafe(problem)
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS):
            raise Unsafe(problem)
        if isinstance(node, ast.keyword) and not (node.arg and isinstance(node.value, ast.Constant)):
            raise Unsafe(problem)
        if isinstance(node, ast.Name) and id(node) not in called and not _may_stand(node.id):
            raise Unsafe(problem)
        if isinstance(node, ast.Constant) and not (
            isinstance(node.value, (int, float)) or (id(node) in texts and _is_text(node.value))
        ):
            raise Unsafe(problem)
        if _grows(node):
            raise Unsafe(f"the size {_shown(text)} has a power without bound")


def _is_called(node: ast.AST, names: tuple[str, ...]) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _is_text(value: object) -> bool:
    return isinstance(value, str) and (_SYMBOL.fullmatch(value) is not None or _NUMBER.fullmatch(value) is not None)


def _may_stand(name: str) -> bool:
    return name in _WORDS or _SYMBOL.fullmatch(name) is not None


def _grows(node: ast.AST) -> bool:
    """Say whether a node is a power or a shift of numbers, or has an exponent that is not small: SymPy computes it."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        base, exponent = node.left, node.right
    elif _is_called(node, ("Pow", "PowByNatural", "FloatPow", "LShift")):
        if len(node.args) != 2:
            return True
        base, exponent = node.args
    else:
        return False
    numbers = [part.value for part in ast.walk(exponent) if isinstance(part, ast.Constant)]
    plain = all(
        isinstance(part, (ast.Constant, ast.UnaryOp, ast.USub, ast.Name, ast.Load, ast.Call))
        for part in ast.walk(exponent)
    ) and not _is_called(exponent, ("Pow", "PowByNatural", "LShift"))
    small = plain and all(isinstance(number, (int, float)) and abs(number) <= _LARGEST_POWER for number in numbers)
    symbols = [
        node
        for node in ast.walk(base)
        if _is_called(node, ("Symbol",)) or (isinstance(node, ast.Name) and _SYMBOL.fullmatch(node.id))
    ]
    return not small or not symbols


def _check_tree(text: str, depth: int) -> None:
    """Check the description of a tree of arguments: JSON, with JSON in its contexts."""
    if depth > 4:
        raise Unsafe("a tree of arguments is nested too deeply")
    try:
        waiting: list[Any] = [json.loads(text)]
    except ValueError:
        if depth:
            return  # a plain text
        raise Unsafe("a tree of arguments is no JSON") from None
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "__enum__" in value:
                raise Unsafe(f"a tree of arguments imports {_shown(value.get('fqn'))}")
            module = value.get("default_factory_module", "builtins")
            if module not in _FACTORIES:
                raise Unsafe(f"a tree of arguments imports {_shown(module)}")
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, str) and value[:1] in ("{", "[", " ", "\t", "\n", "\r", '"'):
            _check_tree(value, depth + 1)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
