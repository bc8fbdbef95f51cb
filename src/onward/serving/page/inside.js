// Inside the model at the chosen token: lens, attention, attribution, and what is switched off.
import { ask, node } from "./api.js";

const at = (id) => document.getElementById(id);
const off = { heads: new Set(), layers: new Set() };
let attention = [], shown = [], roles = [];

export const edits = () => {
  const heads = [...off.heads].map((name) => name.split(".").map(Number)), layers = [...off.layers];
  return heads.length || layers.length ? { heads, layers } : undefined;
};

// A position of the lens in words: blocks.0.in is the embedding, blocks.2.out the output of layer 2.
const depth = (name) => name.replace(/^blocks\.0\.in$/, "embedding").replace(/^blocks\.(\d+)\.out$/, "layer $1");

const shade = (made, share) => (made.style.setProperty("--p", Math.min(1, Math.max(0, share))), made);

function drawAttention() {
  const [layer, head] = [Number(at("layer").value), Number(at("head").value)];
  drawMaps(layer, head);
  const weights = attention[layer]?.[head] ?? [];
  at("role").textContent = roles[layer]?.[head] ?? "";
  at("attention").replaceChildren(...weights.map((weight, index) =>
    shade(node("span", { className: "token", textContent: shown[index].replaceAll("\n", "↵"), title: weight.toFixed(3) }), 2 * weight)));
}
at("layer").oninput = at("head").oninput = drawAttention;

// All heads as rows, all tokens as columns; the chosen head has a mark at its left.
function drawMaps(layer, head) {
  const canvas = at("maps"), rows = attention.flat(), scale = window.devicePixelRatio || 1, left = 8;
  const height = Math.min(12, Math.max(2, Math.floor(360 / rows.length))), width = canvas.clientWidth;
  [canvas.width, canvas.height] = [width * scale, (height * rows.length + attention.length) * scale];
  canvas.style.height = `${canvas.height / scale}px`;
  canvas.setAttribute("aria-label", `attention of ${rows.length} heads to ${shown.length} tokens; layer ${layer} head ${head} is marked`);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = `rgb(${getComputedStyle(canvas).getPropertyValue("--accent")})`;
  attention.forEach((heads, i) => heads.forEach((weights, j) => {
    const top = (i * heads.length + j) * height + i, column = (width - left) / weights.length;
    pen.globalAlpha = 1;
    if (i === layer && j === head) pen.fillRect(0, top, left - 3, height);
    weights.forEach((weight, k) => {
      pen.globalAlpha = Math.sqrt(weight);
      pen.fillRect(left + k * column, top, column, height);
    });
  }));
  canvas.onclick = (event) => {
    const heads = attention[0].length, i = Math.min(attention.length - 1, Math.floor(event.offsetY / (heads * height + 1)));
    at("layer").value = i;
    at("head").value = Math.min(heads - 1, Math.max(0, Math.floor((event.offsetY - i * (heads * height + 1)) / height)));
    drawAttention();
  };
}

function toggle(set, name, label, title) {
  const made = node("button", { textContent: label, title });
  made.setAttribute("aria-pressed", String(set.has(name)));
  made.onclick = () => {
    set.delete(name) || set.add(name);
    made.setAttribute("aria-pressed", String(set.has(name)));
    document.dispatchEvent(new Event("edited"));
  };
  return made;
}

export async function loadParts(model) {
  ({ roles } = await ask(`/api/roles?model=${encodeURIComponent(model)}`));
  at("layer").max = roles.length - 1;
  at("head").max = roles[0].length - 1;
  switchOff();
}

export function switchOff({ heads = [], layers = [] } = {}) {
  off.heads = new Set(heads.map((head) => head.join(".")));
  off.layers = new Set(layers);
  at("parts").replaceChildren(...roles.map((heads, layer) => node("div", { className: "row" },
    toggle(off.layers, layer, `layer ${layer}`, `layer ${layer}`),
    ...heads.map((role, head) => toggle(off.heads, `${layer}.${head}`, `${layer}.${head}`, role || `head ${head}`)))));
}

export async function look(body, texts, target, signal) {
  const [lens, maps, parts] = await Promise.all([ask("/api/lens", body, signal), ask("/api/attention", body, signal),
    ask("/api/attribution", { ...body, target }, signal)]);
  [attention, shown] = [maps.weights, texts];
  at("inside").className = "shown";
  drawAttention();
  at("lens").tBodies[0].replaceChildren(...lens.layers.map(({ name, rows }) => node("tr", {}, node("th", { scope: "row", textContent: depth(name) }),
    ...rows.map((row) => shade(node("td", { textContent: JSON.stringify(row.text), title: row.probability.toFixed(3) }), row.probability)))));
  const most = Math.max(...parts.heads.flat().map(Math.abs), ...parts.mlps.map(Math.abs), 1e-9);
  const cell = (value) => shade(node("td", { textContent: value.toFixed(2) }), Math.abs(value) / most);
  at("attribution").tBodies[0].replaceChildren(
    node("tr", {}, node("th", { textContent: JSON.stringify(parts.text) }), ...parts.heads[0].map((_, head) => node("th", { scope: "col", textContent: `head ${head}` })), node("th", { scope: "col", textContent: "MLP" })),
    ...parts.heads.map((heads, layer) => node("tr", {}, node("th", { scope: "row", textContent: `layer ${layer}` }), ...heads.map(cell), cell(parts.mlps[layer]))));
}
