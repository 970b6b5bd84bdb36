// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The start of the page of a search.

showTheme();
showResult();
showFront();
showCandidates();
showFound();
foldEmpty();
showNav();
showPrint();
document.documentElement.dataset.ready = "true";
