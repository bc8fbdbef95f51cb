// The text as a tree of tokens: the path that is shown, and its branches.
import { node } from "./api.js";

const at = (id) => document.getElementById(id);
// A node: { token, text, p, parent, children }; the root has no token. `leaf` ends the path that is shown.
export const tree = { root: { children: [] }, leaf: null, chosen: null };

export function path(end) {
  const nodes = [];
  for (let one = end; one?.parent; one = one.parent) nodes.unshift(one);
  return nodes;
}

export function clear() {
  tree.root = { children: [] };
  [tree.leaf, tree.chosen] = [tree.root, null];
}

export function child(parent, token, text, p) {
  let found = parent.children.find((one) => one.token === token);
  if (!found) parent.children.push(found = { token, text, p, parent, children: [] });
  return found;
}

export function draw(start, choose) {
  at("text").replaceChildren(...(start ? [node("span", { textContent: start })] : []), ...path(tree.leaf).map((one, index) => {
    const made = node("button", { className: one === tree.chosen ? "token on" : "token", textContent: one.text.replaceAll("\n", "↵\n"), title: one.p.toFixed(3) });
    made.setAttribute("aria-label", `token ${index + 1}: ${one.text}, probability ${one.p.toFixed(3)}`);
    made.style.setProperty("--p", one.p);
    made.onclick = made.onfocus = () => choose(one);
    return made;
  }));
  const shown = new Set(path(tree.leaf));
  const walk = (first) => {
    const chain = [first];
    while (chain.at(-1).children.length === 1) chain.push(chain.at(-1).children[0]);
    const text = chain.map((one) => one.text).join("").replaceAll("\n", "↵");
    const made = node("button", { textContent: text.length > 48 ? `${text.slice(0, 48)}…` : text });
    if (shown.has(chain.at(-1))) made.setAttribute("aria-current", "true");
    made.onclick = () => {
      for (tree.leaf = chain.at(-1); tree.leaf.children.length;) tree.leaf = tree.leaf.children[0];
      tree.chosen = null;
      draw(start, choose);
    };
    return node("li", {}, made, branches(chain.at(-1)));
  };
  const branches = (parent) => (parent.children.length ? node("ul", {}, ...parent.children.map(walk)) : "");
  const split = (one) => one.children.length > 1 || one.children.some(split);
  at("branches").hidden = !split(tree.root);
  at("tree").replaceChildren(split(tree.root) ? branches(tree.root) : "");
}

export function mark() {
  const nodes = path(tree.leaf);
  [...at("text").querySelectorAll("button")].forEach((made, index) => made.classList.toggle("on", nodes[index] === tree.chosen));
}
