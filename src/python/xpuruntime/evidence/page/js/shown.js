// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The page of a record that has no page of its own.

/** On a narrow screen each table scrolls in its own place. */
function showTables() {
  for (const shown of document.querySelectorAll(".xrt-report table")) {
    const place = scrolling(shown.caption ? shown.caption.textContent : "Facts", { class: "scroll" });
    shown.replaceWith(place);
    place.append(shown);
  }
}

start(showTables);
