// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// The theme makes a landmark without a name for each button that copies code, and lets no key scroll wide tables, nor wide
// code where there is no pointer.
new MutationObserver(() => {
  for (const bar of document.querySelectorAll(".md-code__nav:not([role])")) bar.setAttribute("role", "none");
  for (const wide of document.querySelectorAll("pre > code:not([tabindex]), .md-typeset__scrollwrap:not([tabindex])")) {
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
  }
}).observe(document.body, { attributeFilter: ["tabindex"], childList: true, subtree: true });
