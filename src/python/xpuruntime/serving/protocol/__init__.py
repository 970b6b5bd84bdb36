# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Codecs of the Open Inference Protocol: decode bytes into messages and encode them, without a socket.

Data of clients are untrusted: lengths, shapes, datatypes and names are checked before they are used, and every refusal
is a `ServingError`.
"""
