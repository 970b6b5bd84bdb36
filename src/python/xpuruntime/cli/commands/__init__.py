# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Commands of ``xrt``, one module each; what several share is beside this folder."""
