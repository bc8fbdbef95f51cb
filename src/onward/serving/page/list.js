// The kept conversations: open, rename, delete.
import { at, button, node, quoted, say } from "./dom.js";
import { kept, refresh, remove, rename } from "./store.js";

let open = () => {}, forget = () => {}, named = () => {}, current = "";

function renaming(item, { id, title }) {
  const input = node("input", { value: title, maxLength: 120, dir: "auto" });
  input.setAttribute("aria-label", "New name");
  const close = (save) => {
    input.onblur = null;
    if (save && input.value.trim() && input.value !== title) {
      rename(id, input.value.trim());
      named(id, input.value.trim());
    }
    drawList(current);
  };
  input.onkeydown = (event) => {
    if (event.key === "Enter") close(true);
    if (event.key === "Escape") close(false);
  };
  input.onblur = () => close(true);
  item.replaceChildren(input);
  input.select();
}

function deleted({ id, title }) {
  const back = remove(id);
  forget(id);
  drawList(current);
  say(`Deleted ${quoted(title)}.`, ["Undo", () => {
    back();
    drawList(current);
    say();
  }]);
}

export function drawList(shown) {
  current = shown;
  const all = kept().filter((one) => one.title);
  at("kept").replaceChildren(...all.map((one) => {
    const item = node("li"), opener = button(one.title, () => open(one.id), { className: "opener", dir: "auto", title: one.title });
    if (one.id === shown) opener.setAttribute("aria-current", "true");
    const small = (label, sign, does) => {
      const made = button(sign, does, { className: "small", title: label });
      made.setAttribute("aria-label", `${label} ${one.title}`);
      return made;
    };
    item.append(opener, small("Rename", "✎", () => renaming(item, one)), small("Delete", "✕", () => deleted(one)));
    return item;
  }));
  at("kept-none").hidden = all.length > 0;
}

// `opened`, `forgotten` and `renamed` are called with the id of a conversation, the last also with its new name.
export function makeList(opened, forgotten, renamed) {
  [open, forget, named] = [opened, forgotten, renamed];
  refresh();
  addEventListener("storage", () => { // another window has changed the conversations
    refresh();
    drawList(current);
  });
}
