# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""``xrt demo``."""

from __future__ import annotations

from xpuruntime.cli.options import DeviceOption, JsonOption, PolicyOption

__all__ = ["demo"]


def demo(device: DeviceOption = None, policy: PolicyOption = None, json: JsonOption = False) -> int:
    """Run the shipped digits model on real images: plan, accuracy, latency, evidence, lock, verification.

    Exits with 1 when the policy was not honoured, a claim of the verification failed, or the accuracy is below 98 %.
    """
    from xpuruntime.cli.exit_codes import ExitCode
    from xpuruntime.cli.output import console, print_json
    from xpuruntime.demo import run_demo

    result = run_demo(device=device, policy=policy, console=None if json else console(markup=True))
    if json:
        print_json(result.to_dict())
    return ExitCode.OK if result.honoured and result.accurate and result.verified else ExitCode.NOT_HONOURED
