// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The start of the page of a verification.

showTheme();
showVerdict();
showClaims();
showLimits();
showReasons();
showMachine();
foldEmpty();
showNav();
showPrint();
document.documentElement.dataset.ready = "true";
