// The theme puts wide tables into boxes that scroll, and the button that copies code into a landmark of its own. A box is
// reached with the keyboard if it scrolls, and then leaves room for sentences; of the button's landmark nothing is announced.
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
  for (const nav of document.querySelectorAll(".md-code__nav")) nav.role = "presentation";
};
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", mend);
