# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sources of a server: a settings file with its models, or one model with what is stated beside it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import InputError
from xpuruntime.serving.models.settings import SCHEMA, ServeSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["is_settings_file", "settings_of_source"]


def is_settings_file(source: str | os.PathLike[str]) -> bool:
    """Return whether a source is a settings file, by its name."""
    return os.fspath(source).endswith((".yaml", ".yml", ".json"))


def settings_of_source(
    source: str | os.PathLike[str], model: Mapping[str, Any], *, name: str | None, given: Sequence[str]
) -> ServeSettings:
    """Return the settings in a file, or those of one model.

    Parameters
    ----------
    source : str or path
        A settings file, or a model: file, artifact or folder of versions.
    model : mapping
        Further keys of the model, such as ``lock``; those that are ``None`` are left out.
    name : str or None
        Of the model in paths; default: that of its file.
    given : sequence of str
        Arguments that were given for one model, as the user knows them. A settings file has its own.

    Raises
    ------
    InputError
        Something was given beside a settings file.
    PolicyError
        The settings are not valid.
    """
    if is_settings_file(source):
        if given:
            raise InputError(f"{given[0]} describes one model, and {source} has its own. Fix: state it in the file")
        return ServeSettings.load(source)
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(source).resolve().stem)
    keys = {key: value for key, value in model.items() if value is not None}
    return ServeSettings.coerce(
        {"schema": SCHEMA, "models": {stem if name is None else name: {"source": os.fspath(source), **keys}}}
    )
