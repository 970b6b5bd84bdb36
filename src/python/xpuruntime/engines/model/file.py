# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reader of model files, which says what a file really is when it is no ONNX model."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from xpuruntime.errors import ModelError
from xpuruntime.files.paths import kind_of, reason_of
from xpuruntime.files.reading import NotRegularError, open_regular

if TYPE_CHECKING:
    import onnx

#: A protobuf message holds at most this many bytes.
MAX_PROTOBUF = (1 << 31) - 1

#: What makes a folder a language model of ONNX Runtime GenAI.
GENERATION_CONFIG = "genai_config.json"
#: Configuration of a model of transformers.
MODEL_CONFIG = "config.json"
#: Formats of folders with a language model that engines generate with.
GENERATION_FORMATS = ("genai", "transformers", "openvino-genai")

_REEXPORT = "export the model to ONNX (.onnx) and give that file"

# First bytes, what they mean, and what to do.
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs.github.com/", "a Git LFS pointer, not the model itself", "run `git lfs pull`"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image", _REEXPORT),
    (b"\xff\xd8\xff", "a JPEG image", _REEXPORT),
    (b"GIF8", "a GIF image", _REEXPORT),
    (b"%PDF-", "a PDF document", _REEXPORT),
    (b"\x1f\x8b", "gzip-compressed data", "decompress it first (gunzip)"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed data", "decompress it first (zstd -d)"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (perhaps a Keras model)", "convert it with tf2onnx"),
    (b"GGUF", "a GGUF model", "GGUF holds no graph: get the ONNX export of the model"),
    (b"\x93NUMPY", "a NumPy array (.npy)", _REEXPORT),
    (b"ptrt", "a TensorRT engine", "give the ONNX model the engine was built from"),
    (b"ftrt", "a TensorRT engine", "give the ONNX model the engine was built from"),
    (b"\x7fELF", "an ELF program or library", _REEXPORT),
    (b"<?xml", "an XML file (perhaps OpenVINO IR)", "give the ONNX model the IR was made from"),
    (
        b"<ir_version",
        "the textual form of ONNX",
        "write it as protobuf: onnx.save(onnx.parser.parse_model(text), path)",
    ),
)
#: Files of xpuruntime, by how they begin; keys of a lock are sorted, and those of a policy may be in any order.
_OURS = (
    (rb'^\{\s*"digest": "sha256:', "a lock of xpuruntime", "name the model, and this file with --lock (lock=)"),
    (
        rb'^\{\s*"schema"\s*:\s*"xpuruntime\.report',
        "a report of xpuruntime",
        "name the model that ran; `xrt explain` alone takes reports",
    ),
    (
        rb'(?m)^(?:\{\s*")?(?:schema"?\s*:\s*"?xpuruntime\.policy/|(?:execution|kernels)"?\s*:)',
        "a policy of xpuruntime",
        "name the model, and this file with --policy (policy=)",
    ),
)


def generation_folder(model: Any, config: str = GENERATION_CONFIG) -> Path | None:
    """Return the folder where `model` names one with such a configuration, else ``None``."""
    if not isinstance(model, (str, os.PathLike)) or not isinstance(os.fspath(model), str):
        return None
    folder = Path(model)
    return folder if kind_of(folder) == "folder" and kind_of(folder / config) != "missing" else None


def refuse(where: str, reason: str, fix: str) -> ModelError:
    """Return the `ModelError` that names the model, the reason and the fix."""
    return ModelError(f"cannot use the model {where!r}: {reason}. Fix: {fix}.")


def looks_like(head: bytes) -> tuple[str, str] | None:
    """Return what a file that starts with `head` is, and what to do about it; None when it is not recognized."""
    for magic, what, fix in _MAGIC:
        if head.startswith(magic):
            return what, fix
    if head.startswith(b"PK\x03\x04"):
        if b"data.pkl" in head:
            return "a PyTorch checkpoint (.pt, .pth)", "export it with torch.onnx.export"
        if b".npy" in head[:128]:
            return "a NumPy archive (.npz)", _REEXPORT
        return "a ZIP archive (perhaps a PyTorch .pt or .pt2 file)", "unpack it, or export it with torch.onnx.export"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a Python pickle", "export the object in it to ONNX"
    if head[4:8] == b"TFL3":
        return "a TensorFlow Lite model", "convert it with tf2onnx --tflite"
    if head[4:8] == b"ORTM":
        return "an ORT-format model (.ort)", "give the ONNX model it was made from"
    if head[257:262] == b"ustar":
        return "a tar archive", "unpack it first"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file", "it holds weights without a graph: export the model to ONNX"
    text = head.lstrip()
    for pattern, what, fix in _OURS:
        if re.search(pattern, text):
            return what, fix
    if text[:1] in (b"{", b"["):
        return "a JSON file", "an ONNX model in JSON form must be written as protobuf first (onnx.save)"
    if text[:9].lower() == b"<!doctype" or text[:5].lower() == b"<html":
        return "an HTML page (a download that failed?)", "download the model again"
    return None


def read(path: Any) -> tuple[str, bytes, os.stat_result]:
    """Read a whole model file."""
    with opened(path) as (where, file, facts):
        return where, file.read(facts.st_size), facts


@contextlib.contextmanager
def opened(path: Any) -> Iterator[tuple[str, BinaryIO, os.stat_result]]:
    """Open a model file; give its path, the file, which a protobuf can hold, and its facts."""
    where = path.__fspath__() if hasattr(path, "__fspath__") else path
    if not isinstance(where, str):
        raise ModelError(
            f"a model is given as the path of an .onnx file, as its bytes or as an onnx.ModelProto, not as "
            f"{type(path).__name__}. Fix: give onnx.load(path), or the path itself."
        )
    try:
        with open_regular(where) as file:
            facts = os.fstat(file.fileno())
            if facts.st_size == 0:
                raise refuse(where, "the file is empty", "write or download it again")
            if facts.st_size > MAX_PROTOBUF:
                head = file.read(512)
                known = looks_like(head)
                if known is not None:
                    raise refuse(where, f"it is not ONNX; it looks like {known[0]}", known[1])
                raise refuse(
                    where,
                    f"the file has {facts.st_size} bytes, and a protobuf holds at most 2 GiB",
                    "keep the weights outside: onnx.save_model(model, path, save_as_external_data=True)",
                )
            yield where, file, facts
    except NotRegularError as error:
        raise refuse(where, reason_of(error), "give the path of the .onnx file itself") from None
    except FileNotFoundError:
        raise refuse_missing(where) from None
    except IsADirectoryError:
        raise refuse(where, *_directory(where)) from None
    except OSError as error:
        raise refuse(
            where, f"the file cannot be read ({reason_of(error)})", "check the path and its permissions"
        ) from None


class _PartsOfOnnx:
    """Importer of two modules of onnx without the package around them, which imports ten times as much."""

    # The package can be imported later: it then finds these two modules here, so that each exists once.

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._loaded: dict[str, ModuleType] = {}

    def load(self, name: str) -> ModuleType:
        loaded = self._loaded.get(name)
        if loaded is not None:
            return loaded
        with self._lock:
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
            if "onnx" in sys.modules:
                return importlib.import_module(name)
            _import_when_used("google.protobuf.internal", "python_message")
            package = importlib.util.find_spec("onnx")
            spec = PathFinder.find_spec(name, package.submodule_search_locations if package is not None else None)
            if spec is None or spec.loader is None:
                return importlib.import_module(name)  # its error names the package
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            return self._loaded.setdefault(name, module)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the spec of a module that is loaded, for Python's own import of it."""
        if not name.startswith("onnx."):
            return None
        with self._lock:
            loaded = self._loaded.get(name)
        # A class that derives from importlib.abc.Loader would import as much as is saved here.
        return None if loaded is None else ModuleSpec(name, self, origin=loaded.__file__)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._loaded[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Leave a module as it is: it has been executed."""


def _import_when_used(package: str, name: str) -> None:
    """Have a module imported when a name of it is used first: protobuf's classes in Python, unless those in C serve."""
    full = f"{package}.{name}"
    if full in sys.modules or (spec := importlib.util.find_spec(full)) is None or spec.loader is None:
        return
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[full] = module_from_spec(spec)
    spec.loader.exec_module(module)
    setattr(sys.modules[package], name, module)


_PARTS = _PartsOfOnnx()


def onnx_messages() -> Any:
    """Return the module with onnx's message classes: they are those of the package, which is not imported for them."""
    return _PARTS.load("onnx.onnx_ml_pb2")


def onnx_checks() -> Any:
    """Return onnx's compiled module with its checker and the schemas of its operators."""
    return _PARTS.load("onnx.onnx_cpp2py_export")


def parse(data: bytes, where: str) -> onnx.ModelProto:
    """Parse the bytes of a model."""
    from google.protobuf.message import DecodeError

    model = onnx_messages().ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        _refuse_bytes(data, where)
    if not model.HasField("graph"):
        known = looks_like(data[:4096])
        if known is not None:
            raise refuse(where, f"it is not ONNX; it looks like {known[0]}", known[1])
        raise refuse(where, "it holds no graph, so it is not an ONNX model", _REEXPORT)
    if not model.graph.output:
        raise refuse(where, "its graph has no outputs, so there is nothing to compute", "export the model again")
    return model


def _refuse_bytes(data: bytes, where: str) -> None:
    known = looks_like(data[:4096])
    if known is not None:
        raise refuse(where, f"it is not ONNX; it looks like {known[0]}", known[1]) from None
    cut = _cut_off(data)
    if cut is not None:
        raise refuse(
            where,
            f"the file is truncated: the {cut[0]} needs {cut[1]} bytes and {cut[2]} are there",
            "copy or download it again and compare the sizes",
        ) from None
    raise refuse(
        where, "the protobuf is corrupt, or the file is not ONNX", "copy, download or export it again"
    ) from None


# The fields of ModelProto: number to name.
_FIELDS = {
    1: "ir_version",
    2: "producer name",
    3: "producer version",
    4: "domain",
    5: "model version",
    6: "doc string",
    7: "graph",
    8: "opset import",
    14: "metadata",
    20: "training info",
    25: "functions",
    26: "configuration",
}


def _cut_off(data: bytes) -> tuple[str, int, int] | None:
    """Walk the outermost fields; return (field, bytes needed, bytes there) when the last one passes the end."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        name = _FIELDS.get(tag >> 3)
        if name is None:
            return None
        if tag & 7 == 2:
            size, at = _varint(data, at)
            if size > end - at:
                return name, size, max(end - at, 0)
            at += size
        elif tag & 7 == 0:
            _, at = _varint(data, at)
        else:
            return None
    return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
        shift += 7
    return value, at


def refuse_missing(where: str) -> ModelError:
    """Return the `ModelError` of a path where nothing is, with what stands beside it."""
    path = Path(where)
    if path.is_symlink():
        reason = f"it is a symbolic link to {str(path.readlink())!r}, which does not exist"
        return refuse(where, reason, "restore the link's target")
    if not path.parent.is_dir():
        return refuse(where, f"the folder {str(path.parent)!r} does not exist", "check the path")
    import difflib

    beside = sorted(p.name for p in path.parent.glob("*.onnx"))[:5]
    if near := difflib.get_close_matches(path.name, beside, n=1, cutoff=0.8):
        fix = f"name {str(path.with_name(near[0]))!r}"
    elif beside:
        fix = f"check the name; the folder holds {', '.join(map(repr, beside))}"
    else:
        fix = f"check the path (the current folder is {str(Path.cwd())!r})"
    return refuse(where, "there is no such file", fix)


def _directory(where: str) -> tuple[str, str]:
    if (Path(where) / MODEL_CONFIG).is_file() and any(Path(where).glob("*.safetensors")):
        build = f"python -m onnxruntime_genai.models.builder -i {where} -o FOLDER -p fp32 -e cpu"
        return "it is a folder of transformers", f"load it with transformers, or build a folder that runs: {build}"
    inside = sorted(p.name for p in Path(where).glob("*.onnx"))[:5]
    if inside:
        return "it is a directory", f"give a file in it, such as {str(Path(where) / inside[0])!r}"
    return "it is a directory", "give the path of an .onnx file"
