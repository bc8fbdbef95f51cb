// The theme puts wide tables into boxes that scroll, and the button that copies code into a landmark of its own. A box is
// reached with the keyboard if it scrolls, and the button alone is announced.
const name = () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
  for (const nav of document.querySelectorAll(".md-code__nav")) nav.role = "presentation";
};
new MutationObserver(name).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", name);
