// The parts of the model: what each head and layer added to the chosen token's logit, and the parts that are switched off.
import { ask } from "./api.js";
import { at, legible, node, shade } from "./dom.js";

const off = { heads: new Set(), layers: new Set() };
const roles = new Map(); // model -> [layer][head]
let model = "", changed = () => {}, shown = null;

// The heads and layers that are switched off, as the field `edits` of a request.
export const edits = () => {
  const heads = [...off.heads].map((name) => name.split(".").map(Number)), layers = [...off.layers];
  return heads.length || layers.length ? { heads, layers } : undefined;
};

export async function rolesOf(name, signal) {
  if (!roles.has(name)) roles.set(name, (await ask(`/api/roles?model=${encodeURIComponent(name)}`, undefined, signal)).roles);
  return roles.get(name);
}

export function switchOff({ heads = [], layers = [] } = {}) {
  [off.heads, off.layers] = [new Set(heads.map((head) => head.join("."))), new Set(layers)];
  tell();
}

function tell() {
  const { heads, layers } = off, parts = [];
  if (layers.size) parts.push(layers.size === 1 ? "1 layer" : `${layers.size} layers`);
  if (heads.size) parts.push(heads.size === 1 ? "1 head" : `${heads.size} heads`);
  at("off").hidden = !parts.length;
  at("off-parts").textContent = `${parts.join(" and ")} switched off for new answers.`;
  for (const made of at("parts").querySelectorAll("button")) made.setAttribute("aria-pressed", String(isOff(made.dataset)));
  changed();
}

const isOff = ({ layer, head }) => (head === undefined ? off.layers.has(Number(layer)) : off.heads.has(`${layer}.${head}`));

function toggle(layer, head, label, title) {
  const made = node("button", { type: "button", textContent: label, title });
  made.setAttribute("aria-label", title);
  made.dataset.layer = layer;
  if (head !== undefined) made.dataset.head = head;
  made.setAttribute("aria-pressed", String(isOff(made.dataset)));
  made.onclick = () => {
    const [set, name] = head === undefined ? [off.layers, layer] : [off.heads, `${layer}.${head}`];
    set.delete(name) || set.add(name);
    tell();
  };
  return made;
}

const signed = (value) => (value === undefined ? "·" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`);

// Without a chosen token, the parts have no contributions.
export async function showParts(text, signal) {
  const named = await rolesOf(text?.model ?? model, signal);
  shown = text && await ask("/api/attribution", { model: text.model, tokens: text.tokens, target: text.target, edits: text.edits }, signal);
  const most = shown ? Math.max(...shown.heads.flat().map(Math.abs), ...shown.mlps.map(Math.abs), 1e-9) : 1;
  const cell = (made, value = 0) => {
    made.className = value < 0 ? "against" : "for";
    return shade(made, Math.sqrt(Math.abs(value) / most)); // so that small contributions are visible next to an MLP's
  };
  const width = Math.max(...named.map((heads) => heads.length));
  at("parts").tHead.replaceChildren(node("tr", {}, node("td"), ...Array.from({ length: width }, (_, head) => node("th", { scope: "col", textContent: `H${head}` })), node("th", { scope: "col", textContent: "MLP" })));
  at("parts").tBodies[0].replaceChildren(...named.map((heads, layer) => node("tr", {},
    node("th", { scope: "row" }, toggle(layer, undefined, `L${layer}`, `layer ${layer}`)),
    ...heads.map((role, head) => {
      const value = shown?.heads[layer][head];
      return node("td", {}, cell(toggle(layer, head, signed(value), `layer ${layer}, head ${head}${role ? ` (${role})` : ""}${shown ? `: ${signed(value)}` : ""}`), value));
    }),
    ...Array.from({ length: width - heads.length }, () => node("td")),
    cell(node("td", { textContent: signed(shown?.mlps[layer]) }), shown?.mlps[layer]))));
  at("logit").textContent = shown ? `The logit of ${JSON.stringify(legible(shown.text))} is ${shown.logit.toFixed(2)}: the embedding adds ${signed(shown.embedding)}, and the parts as below.` : "Choose a token to see what each part added to it.";
}

// `told` is called when parts are switched.
export function makeParts(told) {
  changed = told;
  at("all-on").onclick = () => switchOff();
}

export function partsOf(name) {
  if (model !== name) switchOff(); // another model has other heads
  model = name;
}
