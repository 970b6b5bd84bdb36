// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The start of the page of a comparison.

showTheme();
showVerdict();
showEngines();
showOutputs();
showDrift();
showNotes();
showNav();
showPrint();
document.documentElement.dataset.ready = "true";
