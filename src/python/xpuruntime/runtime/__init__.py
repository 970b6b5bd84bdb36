# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the machine has: devices, streams, memory, tensors, libraries, and the `Machine` snapshot."""
