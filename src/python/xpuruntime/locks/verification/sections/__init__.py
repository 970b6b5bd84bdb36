# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Sections of a verification, one module each; a section produces the claims of its name."""
