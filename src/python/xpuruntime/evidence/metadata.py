# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Metadata of a model file: the kernels that it asks for, where and with what it was exported, and its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from xpuruntime.policies import Policy
from xpuruntime.policies.call_facts import ANY_CALL, escape
from xpuruntime.policies.kernel_rules import KernelRule, RuleMatch

if TYPE_CHECKING:
    from xpuruntime.policies import KernelPolicy

POLICY_KEY = "xpuruntime.policy"
LOCK_KEY = "xpuruntime.lock"
KERNEL_KEY = "xpuruntime.kernel"
#: In a program of PyTorch: its symbols for sizes, and the names that these were given, as JSON.
DIMENSIONS_KEY = "xpuruntime.dimensions"
#: On a node that stands for the operators of two modules: the path of the module whose result it makes.
RESULT_KEY = "xpuruntime.result_of"

#: Operator of the ONNX standard to the operation of a `KernelPolicy` that it is.
OP_OF_NODE = {
    "MatMul": "matmul",
    "Gemm": "matmul",
    "Conv": "conv",
    "Attention": "attention",
    "LayerNormalization": "layer_norm",
    "RMSNormalization": "rms_norm",
}

#: Operator of PyTorch, without its namespace, to the operation of a `KernelPolicy` that it is.
OP_OF_TORCH = {
    **dict.fromkeys(("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "_scaled_mm"), "matmul"),
    **dict.fromkeys(("layer_norm", "native_layer_norm"), "layer_norm"),
    **dict.fromkeys(("rms_norm", "_fused_rms_norm"), "rms_norm"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "cudnn_convolution"), "conv"),
    **dict.fromkeys(
        (
            "scaled_dot_product_attention",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_attention_math",
            "_flash_attention_forward",
            "_efficient_attention_forward",
        ),
        "attention",
    ),
}


def module_of_node(node: str) -> str:
    """Return the path of the module in the name of an exported node: ``"layers.0"`` of ``"layers.0/MatMul"``."""
    return node.rpartition("/")[0]


def pinned_by_rule(policy: KernelPolicy, op_type: str, node: str) -> tuple[str, ...] | None:
    """Return the kernels that a rule asks for at one node, in inference, whatever the sizes and the device.

    ``None`` where no rule is for the node, where the rule leaves the choice (``"auto"``), and where it depends on what
    is known only when the node runs.
    """
    op = OP_OF_NODE.get(op_type)
    if op is None:
        return None
    module = module_of_node(node) or None
    facts = ANY_CALL._replace(op=op, node=node, module=module, phase="infer")
    for rule in policy.compiled_rules.matching(facts):
        if not rule.use:
            continue
        pinned = rule.certainty(facts) == "yes" and rule.use[0] != "auto"
        return rule.use if pinned else None
    return None


def read_policy(text: str | None, marks: Iterable[tuple[str, str, str]], name: str) -> Policy | None:
    """Return the policy that a model carries."""
    policy = None if text is None else Policy.loads(text, "json", name=name)
    rules = []
    for node, op_type, kernels in marks:
        words = tuple(word.strip() for word in kernels.split(",") if word.strip())
        if policy is not None and pinned_by_rule(policy.kernels, op_type, node) == words:
            continue
        op = OP_OF_NODE.get(op_type)
        rules.append(KernelRule(match=RuleMatch(op=op, node=escape(node)), use=words))
    if not rules:
        return policy
    base = Policy() if policy is None else policy
    return base.replace(kernels=base.kernels.replace(rules=(*rules, *base.kernels.rules)))


def digest_tensors(tensors: Iterable[tuple[str, str, Iterable[int], Any]]) -> str:
    """Return one digest of tensors, given as name, type, shape and bytes; their order does not matter."""
    sha256 = hashlib.sha256()
    for name, kind, shape, data in sorted(tensors, key=lambda tensor: tensor[0]):
        sha256.update(f"{name}\0{kind}\0{tuple(shape)}\0".encode())
        sha256.update(hashlib.sha256(data).digest())
    return f"sha256:{sha256.hexdigest()}"


def onnx_digest(graph: Any) -> str | None:
    """Return the digest of the weights of an ``onnx.GraphProto``; ``None`` where some lie in other files."""
    external = 1  # TensorProto.EXTERNAL
    parts = []
    for tensor in graph.initializer:
        if tensor.data_location == external:
            return None
        data = tensor.raw_data if tensor.HasField("raw_data") else tensor.SerializeToString(deterministic=True)
        parts.append((tensor.name, str(tensor.data_type), tuple(tensor.dims), data))
    return digest_tensors(parts)
