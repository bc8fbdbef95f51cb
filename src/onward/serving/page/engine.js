// The engine of one model at this moment: its rows, its queue and the blocks of its cache.
import { ask } from "./api.js";
import { at, node } from "./dom.js";

const EVERY = 500; // milliseconds
const MOST_BLOCKS = 600; // largest number of blocks that are drawn
let shown = "", before = null, timer = 0, watched = false;

// Tokens per second since the last poll, including those of answers that have ended since.
function rate(engine, now) {
  const last = before?.generated[engine.model];
  return last === undefined ? 0 : Math.round((1000 * (engine.generated - last)) / (now - before.time));
}

function drawn(engine, speed) {
  const rows = engine.rows.map((row) => node("tr", {}, ...[row.request, row.label, row.adapter || "none",
    row.doing === "prompt" ? `reads its prompt: ${row.cached} of ${row.prompt}` : `${row.tokens} of ${row.limit} tokens`, row.blocks.length].map((value) => node("td", { textContent: value }))));
  const counts = Object.values(engine.references), shared = counts.filter((count) => count > 1).length;
  const squares = [...counts.slice(0, MOST_BLOCKS).map((count) => node("i", { className: count > 1 ? "shared" : "used" })),
    ...Array.from({ length: Math.max(0, Math.min(engine.blocks, MOST_BLOCKS) - counts.length) }, () => node("i"))];
  const cache = `${counts.length} of ${engine.blocks} blocks of ${engine.block_size} tokens are in use, ${shared} of them shared by several rows; ${engine.kept} are kept for later prompts.`;
  const blocks = node("div", { className: "blocks" }, ...squares);
  blocks.setAttribute("role", "img");
  blocks.setAttribute("aria-label", cache);
  return [
    node("p", { textContent: `${engine.rows.length} of ${engine.capacity} rows, ${engine.waiting.length} waiting, ${speed} tokens/s` }),
    ...(rows.length ? [node("div", { className: "wide", tabIndex: 0 }, node("table", {}, node("thead", {}, node("tr", {}, ...["request", "path", "adapter", "state", "blocks"].map((name) => node("th", { scope: "col", textContent: name })))), node("tbody", {}, ...rows)))] : []),
    blocks,
    node("p", { className: "quiet", textContent: engine.blocks > MOST_BLOCKS ? `${cache} The first ${MOST_BLOCKS} are drawn.` : cache }),
  ];
}

async function look() {
  try {
    const now = performance.now(), { engines } = await ask("/api/engine");
    const names = engines.map((engine) => engine.model), menu = at("engine-model");
    if (names.join() !== [...menu.options].map((one) => one.value).join()) menu.replaceChildren(...names.map((name) => node("option", { textContent: name })));
    const engine = engines.find((one) => one.model === shown) ?? engines[0];
    if (menu.value !== engine.model) menu.value = engine.model;
    at("engine").replaceChildren(...drawn(engine, rate(engine, now)));
    before = { time: now, generated: Object.fromEntries(engines.map((one) => [one.model, one.generated])) };
  } catch (error) {
    at("engine").textContent = error.message;
  }
  if (watched) timer = setTimeout(look, document.hidden ? 10 * EVERY : EVERY);
}

export function showEngine() {
  if (watched) return;
  watched = true;
  look();
}

export function hideEngine() {
  watched = false;
  clearTimeout(timer);
}

// Show the engine of this model from the next look on.
export function engineOf(name) {
  shown = name;
  before = null;
}
at("engine-model").oninput = () => engineOf(at("engine-model").value);
