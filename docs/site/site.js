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
};
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", mend);
addEventListener("load", mend); // pictures have their widths now
