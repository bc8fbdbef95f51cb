// Elements of the page, its status line, and copying.

export const at = (id) => document.getElementById(id);

export function node(name, options = {}, ...children) {
  const made = Object.assign(document.createElement(name), options);
  made.append(...children);
  return made;
}

export const button = (textContent, onclick, options = {}) => node("button", { type: "button", textContent, onclick, ...options });

// Make `options`, the children of `list`, the options of a listbox: a click, the arrow keys, Home, End, Enter and the
// space bar call `choose(index, byKey)`.
export function listbox(list, options, chosen, label, choose) {
  options.forEach((option, index) => {
    option.setAttribute("role", "option");
    option.setAttribute("aria-selected", String(index === chosen));
    option.tabIndex = index === Math.max(chosen, 0) ? 0 : -1;
    option.onclick = () => choose(index, false);
  });
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", label);
  list.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key], current = options.indexOf(event.target);
    const next = event.key === "Enter" || event.key === " " ? current : event.key === "Home" ? 0 : event.key === "End" ? options.length - 1 : current + step;
    if (!options[next]) return;
    event.preventDefault();
    choose(next, true);
  };
}

// Show how probable something is: 0 leaves an element plain, 1 gives it the full color.
export function shade(made, share) {
  made.style.setProperty("--p", Math.min(1, Math.max(0, share)));
  return made;
}

// A token as the page shows it: a part of a character, which the server writes as bytes:\xf0\x9f, becomes <F0 9F>.
export const legible = (text) =>
  text.replace(/^bytes:((?:\\x[0-9a-f]{2})+)$/, (_, bytes) => `<${bytes.slice(2).replaceAll("\\x", " ").toUpperCase()}>`);

export const quoted = (text) => `“${legible(text).replaceAll("\n", "↵")}”`;

// Show a sentence in the status line, with a button if `action` is [label, function].
export function say(message = "", action = null) {
  at("status").className = "";
  at("status").replaceChildren(message, ...(action ? [" ", button(action[0], action[1])] : []));
}

export function report(error) {
  if (error.name === "AbortError") return;
  say(error.message);
  at("status").className = "error";
}

// Return a handler that also reports errors, including those of a promise.
export const safely = (handler) => async (...given) => {
  try {
    await handler(...given);
  } catch (error) {
    report(error);
  }
};

// Only pages from https or from this machine can use the clipboard: elsewhere a hidden text is selected and copied.
export async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
  } else {
    const back = document.activeElement, hidden = node("textarea", { value: text, className: "unseen" });
    document.body.append(hidden);
    hidden.select();
    const copied = document.execCommand("copy");
    hidden.remove();
    back?.focus();
    if (!copied) throw new Error("The browser does not let this page copy: select the text and copy it by hand.");
  }
  say("Copied.");
}
