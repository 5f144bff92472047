// Light and dark: what the system says, or what the button chose. Scripts hear of it by the event "theme".
"use strict";
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const kept = (value) => {
    try { // a browser may keep nothing for a file
      if (value !== undefined) localStorage.setItem("frugal-theme", value);
      return localStorage.getItem("frugal-theme");
    } catch {
      return null;
    }
  };
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const button = document.getElementById("theme");

  const show = () => {
    button?.setAttribute("aria-pressed", String(isDark()));
    document.dispatchEvent(new Event("theme"));
  };
  if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
  button?.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    kept(root.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not([open])")) details.open = true;
  });
  show();
})();
