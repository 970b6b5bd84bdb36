// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The start of the page of a comparison.

start(showVerdict, showEngines, showOutputs, showDrift, showNotes);
