# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Conformance checks for any server of the Open Inference Protocol, run as a client."""
