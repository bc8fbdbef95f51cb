// The prediction of each layer (logit lens).
import { ask } from "./api.js";
import { at, legible, node, shade } from "./dom.js";

// A position of the lens in words: blocks.0.in is the embedding, blocks.2.out the output of layer 2.
const depth = (name) => name.replace(/^blocks\.0\.in$/, "embedding").replace(/^blocks\.(\d+)\.out$/, "layer $1");

export async function showLayers({ model, tokens, target, edits }, signal) {
  const { layers } = await ask("/api/lens", { model, tokens, edits }, signal);
  const cell = (row) => shade(node("td", { className: row.token === target ? "own" : "", textContent: JSON.stringify(legible(row.text)), title: row.probability.toFixed(3) }), row.probability);
  at("lens").tBodies[0].replaceChildren(...layers.map(({ name, rows }) =>
    node("tr", {}, node("th", { scope: "row", textContent: depth(name) }), ...rows.map(cell))));
}
