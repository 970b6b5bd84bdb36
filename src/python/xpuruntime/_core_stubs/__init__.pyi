# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Parts of the stub of `xpuruntime._core`, by subject: at run time there is no such module, `_core` has all of it."""
