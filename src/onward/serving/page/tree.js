// The tokens of an answer as a tree: each path from the root to a leaf is a version of the answer.
// A node is { token, text, p, parent, children, end }: p is null if unknown, `end` says how a version ended.

export const newRoot = () => ({ children: [] });

export function path(end) {
  const nodes = [];
  for (let one = end; one?.parent; one = one.parent) nodes.push(one);
  return nodes.reverse();
}

export function child(parent, token, text, p) {
  let found = parent.children.find((one) => one.token === token);
  if (!found) parent.children.push(found = { token, text, p, parent, children: [] });
  return found;
}

export function lastOf(one) {
  while (one.children.length) one = one.children[0];
  return one;
}

// All nodes, each before its children.
export function* all(root) {
  const open = [root];
  while (open.length) {
    const one = open.pop();
    yield one;
    open.push(...[...one.children].reverse());
  }
}

export const leaves = (root, shown) => [...all(root)].filter((one) => one.parent && (one === shown || !one.children.length));

// A tree as lists [token, text, p, index of the parent, end], and back.
export function packed(root) {
  const nodes = [...all(root)], index = new Map(nodes.map((one, place) => [one, place]));
  const short = (p) => (p === null ? null : Number(p.toPrecision(4)));
  return nodes.slice(1).map((one) => [one.token, one.text, short(one.p), index.get(one.parent), one.end ?? 0]);
}

export function unpacked(rows) {
  const nodes = [newRoot()];
  for (const [token, text, p, parent, end] of rows) {
    const made = child(nodes[parent], token, text, p);
    if (end) made.end = end;
    nodes.push(made);
  }
  return nodes;
}
