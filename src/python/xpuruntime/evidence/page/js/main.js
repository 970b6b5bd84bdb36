// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The start of it all.

start(showOverview, showPolicy, showTime, showTimeline, showGraph, showUnits, showTables, showInspector);
