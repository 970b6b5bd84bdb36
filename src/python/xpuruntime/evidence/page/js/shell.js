// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
// Theme, the way through a page, printing.

const THEMES = ["system", "light", "dark"];

function showTheme() {
  const button = document.getElementById("theme");
  let theme = "system";
  try {
    theme = localStorage.getItem("xpuruntime-theme") || theme;
  } catch { /* a browser may refuse to remember anything for a file */ }
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    document.documentElement.style.colorScheme = theme === "system" ? "light dark" : theme;
    button.textContent = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}. Change`);
  };
  button.addEventListener("click", () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const round = dark ? ["system", "light", "dark"] : ["system", "dark", "light"];
    theme = round[(round.indexOf(theme) + 1) % round.length];
    try {
      localStorage.setItem("xpuruntime-theme", theme);
    } catch { /* as above */ }
    apply();
  });
  if (!THEMES.includes(theme)) theme = "system";
  apply();
}

/** Hide the sections that have nothing to show, say of each among the notes why, and hide the notes where there are none. */
function foldEmpty() {
  const isEmpty = ({ lastElementChild: body }) => body.childElementCount === 1 && body.firstElementChild.classList.contains("none");
  const empty = [...document.querySelectorAll("main > section[data-optional]")].filter(isEmpty);
  const notes = document.getElementById("notes");
  for (const section of empty) section.hidden = true;
  if (!notes) return;
  if (isEmpty(notes)) bodyOf("notes").replaceChildren();
  if (empty.length) {
    bodyOf("notes").append(make("h3", { text: "Nothing to show" }), make("ul", {}, empty.map((section) => make("li", {},
      make("strong", { text: section.querySelector("h2").textContent }), `: ${section.lastElementChild.textContent}`))));
  }
  notes.hidden = !bodyOf("notes").childElementCount;
}

function showNav() {
  const nav = document.getElementById("nav");
  const links = new Map();
  for (const section of document.querySelectorAll("main > section[aria-labelledby]:not([hidden])")) {
    const link = make("a", { href: `#${section.id}`, text: section.dataset.short || section.querySelector("h2").textContent });
    links.set(section, link);
    nav.append(link);
  }
  const visible = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) visible[isIntersecting ? "add" : "delete"](target);
    const current = [...links.keys()].find((section) => visible.has(section));
    for (const [section, link] of links) {
      if (section === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }, { rootMargin: "-80px 0px -55% 0px" });
  for (const section of links.keys()) observer.observe(section);
}

/** On paper everything is open. */
function showPrint() {
  let shut = [];
  addEventListener("beforeprint", () => {
    shut = [...document.querySelectorAll("details:not([open])")];
    for (const one of shut) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of shut) one.open = false; });
}

/** Draw the parts of a page, each in a task of its own, so that no page stands still while a large one is drawn. */
async function start(...parts) {
  document.documentElement.dataset.ready = "false";
  for (const part of [showTheme, ...parts, foldEmpty, showNav, showPrint]) {
    part();
    await new Promise((next) => { setTimeout(next); });
  }
  document.documentElement.dataset.ready = "true";
}
