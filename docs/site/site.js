// The theme puts wide tables into boxes that can scroll, and the copy button of each code block into a landmark. This
// script makes a box, and the box of a wide picture, reachable with the keyboard only if it scrolls, and widens the cells
// of a table that contain sentences. It also removes the role of the button's landmark, so that screen readers do not
// announce the landmark.
const LONG = 60; // cells with more characters count as sentences
const mend = () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    const scrolls = box.scrollWidth > box.clientWidth;
    if (!scrolls) box.removeAttribute("tabindex");
    else if (box.tabIndex !== 0) {
      box.tabIndex = 0;
      for (const cell of box.querySelectorAll("td")) cell.classList.toggle("sentence", cell.textContent.length > LONG);
    }
  }
  for (const box of document.querySelectorAll('p:has(> img[src$=".svg"]:only-child)')) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
  for (const nav of document.querySelectorAll(".md-code__nav")) nav.role = "presentation";
  for (const host of document.querySelectorAll("body > div")) if (host.shadowRoot && !searches.has(host)) mendSearch(host);
};
// The search dialog is in a shadow root, which styles and scripts of the page do not reach: its list of results becomes
// reachable with the keyboard, and the paths of the results get enough contrast.
const searches = new Set();
const mendSearch = (host) => {
  searches.add(host);
  const style = document.createElement("style");
  style.textContent = '[id$="-path"] > li { color: var(--onward-muted) !important; opacity: 1 !important }';
  host.shadowRoot.append(style);
  new MutationObserver(() => {
    for (const box of host.shadowRoot.querySelectorAll('[tabindex="-1"]')) if (box.scrollHeight > box.clientHeight) box.tabIndex = 0;
  }).observe(host.shadowRoot, { childList: true, subtree: true });
};
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", mend);
addEventListener("load", mend); // pictures have their widths now
