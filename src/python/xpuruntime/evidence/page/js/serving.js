// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The start of the page of a server.

showTheme();
showState();
showModels();
showBatches();
showServedMemory();
showServedEvidence();
showNav();
showPrint();
showRefresh();
document.documentElement.dataset.ready = "true";
