# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`decode_json`: JSON from files and peers that are not trusted."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import msgspec

__all__ = ["decode_json"]


_T = TypeVar("_T")


@overload
def decode_json(data: bytes | str | msgspec.Raw) -> Any: ...


@overload
def decode_json(data: bytes | str | msgspec.Raw, kind: type[_T]) -> _T: ...


def decode_json(data: bytes | str | msgspec.Raw, kind: Any = Any) -> Any:
    """Decode JSON as `msgspec.json.decode` does, with one class of errors for everything that can be wrong with it.

    Raises
    ------
    msgspec.DecodeError
        The text is no JSON, is no UTF-8, or is nested too deeply; `msgspec.ValidationError`, a subclass, where it is
        not of the type `kind`.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError:
        raise
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None
    except (ValueError, OverflowError, msgspec.MsgspecError) as error:  # text that is no UTF-8 among them
        raise msgspec.DecodeError(str(error)) from None
