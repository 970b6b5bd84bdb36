# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""NCCL itself: the library, opened on first use, and the part of its C interface that is used here."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from xpuruntime.errors import EngineError, EngineUnavailable
from xpuruntime.runtime.libraries.loading import preload
from xpuruntime.runtime.packages import install_command

__all__ = [
    "DTYPES",
    "IN_PROGRESS",
    "OPS",
    "SUCCESS",
    "NcclConfig",
    "NcclLibrary",
    "UniqueId",
    "nccl_library",
    "version_text",
]

SONAME = "libnccl.so.2"
#: The first with everything that a communicator needs; what came later is asked for where it is used.
OLDEST = (2, 18, 0)

SUCCESS, IN_PROGRESS = 0, 7

#: Our names of types to NCCL's numbers, and the first version that has each.
DTYPES: dict[str, tuple[int, tuple[int, int]]] = {
    "int8": (0, (2, 0)),
    "uint8": (1, (2, 0)),
    "int32": (2, (2, 0)),
    "uint32": (3, (2, 0)),
    "int64": (4, (2, 0)),
    "uint64": (5, (2, 0)),
    "float16": (6, (2, 0)),
    "float32": (7, (2, 0)),
    "float64": (8, (2, 0)),
    "bfloat16": (9, (2, 10)),
    "float8_e4m3fn": (10, (2, 24)),
    "float8_e5m2": (11, (2, 24)),
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}

_UNDEFINED = -(2**31)
_MAGIC = 0xCAFEBEEF
#: The version whose layout `NcclConfig` has; older libraries read the part of it that they know.
_LAYOUT = 22700


class UniqueId(ctypes.Structure):
    """What the ranks of one communicator find each other by: 128 bytes, passed by value."""

    _fields_: ClassVar = [("internal", ctypes.c_ubyte * 128)]


class NcclConfig(ctypes.Structure):
    """How a communicator is set up; every field starts as "not stated"."""

    _fields_: ClassVar = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
        ("collnet_enable", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("shrink_share", ctypes.c_int),
        ("nvls_ctas", ctypes.c_int),
    ]

    @classmethod
    def unstated(cls, version: int) -> NcclConfig:
        """Return one for a library of this version code."""
        config = cls(ctypes.sizeof(cls), _MAGIC, min(version, _LAYOUT))
        for field in cls._fields_[3:]:
            if field[1] is ctypes.c_int:
                setattr(config, field[0], _UNDEFINED)
        return config


_comm, _size, _int, _pointer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
_stream = ctypes.c_void_p
#: Functions that return a result code, and their arguments.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_int),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRankConfig": (ctypes.POINTER(_comm), _int, UniqueId, _int, ctypes.POINTER(NcclConfig)),
    "ncclCommFinalize": (_comm,),
    "ncclCommDestroy": (_comm,),
    "ncclCommAbort": (_comm,),
    "ncclCommGetAsyncError": (_comm, ctypes.POINTER(_int)),
    "ncclCommCount": (_comm, ctypes.POINTER(_int)),
    "ncclCommUserRank": (_comm, ctypes.POINTER(_int)),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (_pointer, _pointer, _size, _int, _int, _comm, _stream),
    "ncclReduceScatter": (_pointer, _pointer, _size, _int, _int, _comm, _stream),
    "ncclReduce": (_pointer, _pointer, _size, _int, _int, _int, _comm, _stream),
    "ncclAllGather": (_pointer, _pointer, _size, _int, _comm, _stream),
    "ncclBroadcast": (_pointer, _pointer, _size, _int, _int, _comm, _stream),
    "ncclSend": (_pointer, _size, _int, _int, _comm, _stream),
    "ncclRecv": (_pointer, _size, _int, _int, _comm, _stream),
}


class NcclLibrary:
    """An opened libnccl, with its functions typed as attributes. Calls run without the GIL."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            library = ctypes.CDLL(path)
            for name, arguments in _SIGNATURES.items():
                function = getattr(library, name)
                function.argtypes = arguments
                function.restype = ctypes.c_int
                setattr(self, name, function)
            texts = (library.ncclGetErrorString, library.ncclGetLastError)
        except (OSError, AttributeError) as error:
            raise EngineUnavailable(
                f"{path} cannot be used as NCCL: {error}. Fix: install NCCL {OLDEST[0]}.{OLDEST[1]} or newer, "
                f"{install_command('nccl')}",
                engine="nccl",
            ) from None
        self._error_string, self._last_error = texts
        self._error_string.argtypes, self._error_string.restype = (ctypes.c_int,), ctypes.c_char_p
        self._last_error.argtypes, self._last_error.restype = (ctypes.c_void_p,), ctypes.c_char_p
        code = ctypes.c_int()
        self.ncclGetVersion(ctypes.byref(code))
        self.version_code = code.value
        self.version = _split_version(code.value)
        if self.version < OLDEST:
            raise EngineUnavailable(
                f"{path} is NCCL {version_text(self.version)}, and {OLDEST[0]}.{OLDEST[1]} or newer is needed. Fix: "
                f"{install_command('nccl')}",
                engine="nccl",
            )

    if TYPE_CHECKING:  # the functions of _SIGNATURES

        def __getattr__(self, name: str) -> Any: ...

    def has(self, *version: int) -> bool:
        """Return whether the library is of this version or newer."""
        return self.version >= version

    def explain(self, result: int) -> str:
        """Return NCCL's own words for a result code, with what it said last, which may be of an earlier call."""
        words = (self._error_string(result) or b"").decode(errors="replace")
        last = (self._last_error(None) or b"").decode(errors="replace").strip()
        return f"{words}; last message: {last}" if last else words

    def make_id(self) -> bytes:
        """Return a new unique id. The ranks that get it meet at this process."""
        made = UniqueId()
        result = self.ncclGetUniqueId(ctypes.byref(made))
        if result != SUCCESS:
            raise EngineError(
                f"NCCL cannot make the id that ranks meet by: {self.explain(result)}. Fix: let it use a network "
                "interface of this machine, NCCL_SOCKET_IFNAME names one",
                engine="nccl",
                status=int(result),
            )
        return bytes(made)


_lock = threading.Lock()
_opened: list[NcclLibrary] = []


def nccl_library() -> NcclLibrary:
    """Return NCCL, opened on the first call: the copy that the process has loaded already, else the first found."""
    with _lock:
        if not _opened:
            if not sys.platform.startswith("linux"):
                raise EngineUnavailable(
                    f"NCCL is not available on {sys.platform}: NVIDIA ships it for Linux only. Fix: run this on Linux",
                    engine="nccl",
                )
            (found,) = preload([SONAME], extra="nccl")
            _opened.append(NcclLibrary(found.path))
        return _opened[0]


def version_text(version: tuple[int, ...]) -> str:
    """Return ``"2.28.9"`` for ``(2, 28, 9)``."""
    return ".".join(map(str, version))


def _split_version(code: int) -> tuple[int, int, int]:
    if code < 10000:
        return code // 1000, code // 100 % 10, code % 100
    return code // 10000, code // 100 % 100, code % 100
