# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reset of ``fully_shard`` modules: private state of FSDP2 after a step that was broken off."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from xpuruntime.pytorch._private_api.lookup import TABLE, PrivateName

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["reset_fully_sharded"]


def reset_fully_sharded(modules: Iterable[Any]) -> None:
    """Let modules of ``fully_shard`` begin anew after a step that was broken off: parameters are sharded again.

    PyTorch's own ``reset_iter_state``, of 2.13, waits for events of the failed step, which those of a capture refuse.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in modules:
        if isinstance(module, fsdp.FSDPModule) and hasattr(module, "_get_fsdp_state"):
            _reset_fsdp_state(module._get_fsdp_state())


def _reset_fsdp_state(state: Any) -> None:
    idle = type(state._training_state).IDLE
    for shared, names in (
        (state._comm_ctx, ("all_gather_state", "reduce_scatter_state")),
        (state._state_ctx, ("iter_forward_root", "post_optim_event")),
    ):
        for name in names:
            if hasattr(shared, name):
                setattr(shared, name, None)
    for name in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
        getattr(state._comm_ctx, name, []).clear()
    state._state_ctx.post_backward_final_callback_queued = False
    state._modules_to_run_forward.clear()
    state._training_state = idle
    for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
        for name in ("_all_gather_result", "_post_reduce_event", "_all_reduce_state", "_reshard_after_forward_event"):
            if hasattr(group, name):
                setattr(group, name, None)
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = idle
        group._to_sharded()


_HALF_WAY = "modules stay as a step that was broken off left them"
TABLE.append(PrivateName("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "state to reset", _HALF_WAY))
TABLE.append(
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded",
        "which gives the memory of whole parameters back",
        _HALF_WAY,
    )
)
