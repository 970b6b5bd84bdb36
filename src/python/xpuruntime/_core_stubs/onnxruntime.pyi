# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `xpuruntime._core` has for ONNX Runtime.

``SessionOptions.register_custom_ops_library(_core.__file__)`` makes the kernels of this library operators of the domain
``xpuruntime`` for the sessions of these options.
"""

from collections.abc import Mapping
from typing import TypedDict

from xpuruntime._core import KernelRules

class OnnxRuntimeOp(TypedDict):
    """One operator.

    `inputs` and `optional_inputs` are names in their order, `attributes` maps names to ``"int"``, ``"ints"``,
    ``"float"`` or ``"string"``, and `providers` are the execution providers that have it.
    """

    inputs: list[str]
    optional_inputs: list[str]
    attributes: dict[str, str]
    providers: list[str]

class OnnxRuntimeRules:
    """KernelRules under a name that nodes carry as their attribute ``rules``: those of each node by name, and others.

    The name is known as long as this object lives, and in this process only. Keep it until the session is open: the
    operators of the session keep the rules from then on.
    """

    def __init__(self, rules: KernelRules, nodes: Mapping[str, KernelRules] = ...) -> None: ...
    @property
    def key(self) -> str:
        """What to write into the attribute."""

def onnxruntime_ops() -> dict[str, OnnxRuntimeOp]:
    """Return the operators of the domain ``xpuruntime``, by name; empty where they were not built."""
