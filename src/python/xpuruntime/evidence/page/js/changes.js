// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The start of the page of two reports.

start(showHeadline, showReports, showSpeed, showNodes, showRest);
