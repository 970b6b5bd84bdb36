# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The models that are served: settings, versions, loading, memory, evidence and readiness."""
