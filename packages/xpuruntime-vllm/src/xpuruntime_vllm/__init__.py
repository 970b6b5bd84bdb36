# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""vLLM under a policy of xpuruntime.

`LLM` and the command ``xrt-vllm serve`` set vLLM's configuration by a policy. The plugin `register`, which vLLM calls
in every process, reads back the selections of each worker, refuses to start where they are others than requested, and
writes evidence.
"""

from xpuruntime_vllm.launch import LLM
from xpuruntime_vllm.worker import register

__all__ = ["LLM", "register"]
