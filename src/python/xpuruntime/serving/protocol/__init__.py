# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Codecs of the Open Inference Protocol: bytes to messages and back, without a socket.

What a client sent is never trusted: lengths, shapes, datatypes and names are compared before anything is made of them,
and every refusal is a `ServingError`.
"""
