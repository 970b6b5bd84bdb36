# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Monitoring of a server: counters, metrics for Prometheus, the access log, and pages of its state."""
