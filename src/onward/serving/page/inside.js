// The panel next to the conversation: the chosen token, and one view at a time of how the model computed it.
import { at, quoted, report } from "./dom.js";
import { hideEngine, showEngine } from "./engine.js";
import { showAttention } from "./attention.js";
import { prepare } from "./generate.js";
import { showLayers } from "./layers.js";
import { showNext } from "./next.js";
import { showParts } from "./parts.js";
import { path } from "./tree.js";

const MOST = 512; // largest number of tokens that the server inspects
const VIEWS = { next: showNext, attention: showAttention, layers: showLayers, parts: showParts };
const tabs = [...document.querySelectorAll("#tabs [role=tab]")];
let chosen = null, looking = null, take = () => {}, waiting = 0;

export const chosenNode = () => chosen?.one ?? null;

const tab = () => tabs.find((one) => one.getAttribute("aria-selected") === "true").dataset.view;

// Choose a token of an answer, or none; `after` is called with another token that is taken in its place.
export function inspect(conversation, turn, answer, one, after) {
  chosen = one && { conversation, turn, answer, one };
  take = after ?? take;
  clearTimeout(waiting);
  waiting = setTimeout(refresh, 60, ""); // while an arrow key is held down, only the last token is inspected
}

function headline() {
  const nodes = chosen ? path(chosen.answer.leaf) : [], place = nodes.indexOf(chosen?.one);
  at("chosen").textContent = chosen ? `Token ${place + 1} of ${nodes.length}: ${quoted(chosen.one.text)}` : "No token is chosen.";
  at("steps").hidden = !chosen;
  [at("earlier").disabled, at("later").disabled] = [place <= 0, place === nodes.length - 1];
  at("inside").classList.toggle("empty", !chosen);
}

async function text() {
  const { conversation, turn, answer, one } = chosen, before = path(one.parent);
  await prepare(conversation, turn, answer, looking.signal);
  const tokens = [...answer.prompt, ...before.map(({ token }) => token)], texts = [...answer.pieces, ...before.map((each) => each.text)];
  const cut = Math.max(0, tokens.length - MOST);
  return { model: answer.model, tokens: tokens.slice(cut), texts: texts.slice(cut), promptLength: Math.max(0, answer.prompt.length - cut), cut, target: one.token, edits: (answer.leaf.end?.settings ?? answer.settings)?.edits, node: one };
}

// Redraw the panel. If `only` is "chosen", redraw only its first line; if it is the name of a view, redraw this view only if it is open.
export async function refresh(only = "") {
  headline();
  const view = tab(), shown = !at("inside").hidden;
  if (only && only !== view) return;
  looking?.abort();
  looking = new AbortController();
  const { signal } = looking;
  at("lines").replaceChildren(); // new lines show that the new text is read: until then, a click on a token has no effect
  if (shown && view === "engine") showEngine();
  else hideEngine();
  if (!shown || view === "engine" || (!chosen && view !== "parts")) return;
  try {
    const given = chosen && await text();
    at("cut").textContent = given?.cut ? `The text has ${given.cut + given.tokens.length} tokens: this view reads the last ${MOST}.` : "";
    await VIEWS[view](given, signal, (row) => take(chosen.turn, chosen.answer, chosen.one.parent, row));
  } catch (error) {
    report(error);
  }
}

function open(name) {
  for (const one of tabs) {
    const on = one.dataset.view === name;
    one.setAttribute("aria-selected", String(on));
    one.tabIndex = on ? 0 : -1;
    at(`view-${one.dataset.view}`).hidden = !on;
  }
  refresh();
}

// `step` is called with -1 or 1 to choose the token before or after.
export function makeInside(step) {
  at("earlier").onclick = () => step(-1);
  at("later").onclick = () => step(1);
  tabs.forEach((one, index) => {
    one.onclick = () => open(one.dataset.view);
    one.onkeydown = (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const next = tabs[(index + move + tabs.length) % tabs.length];
      next.focus();
      open(next.dataset.view);
    };
  });
}
