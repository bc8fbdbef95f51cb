// The picture of the engine: its rows, its queue and the blocks of its cache.
import { ask, node } from "./api.js";

const place = document.getElementById("engine");
let before = null;

// Tokens per second since the last look: also those of answers that have ended meanwhile.
function rate(engine, index, now) {
  const last = before?.generated[index];
  return last === undefined ? 0 : Math.round((1000 * (engine.generated - last)) / (now - before.time));
}

function drawn(engine, speed) {
  const rows = engine.rows.map((row) =>
    node("tr", {}, ...[row.request, row.label, row.adapter, row.doing,
      row.doing === "prompt" ? `${row.cached} of ${row.prompt}` : `${row.tokens} tokens`, `${row.blocks.length} blocks`]
      .map((value) => node("td", { textContent: value }))));
  const used = Object.entries(engine.references).map(([block, count]) =>
    node("i", { className: count > 1 ? "shared" : "used", title: `block ${block}: ${count} rows` }));
  const free = Math.min(engine.blocks, 400) - used.length;
  const blocks = node("div", { className: "blocks" }, ...used.slice(0, 400), ...Array.from({ length: Math.max(0, free) }, () => node("i")));
  const line = `${engine.model}: ${engine.rows.length} of ${engine.capacity} rows, ${engine.waiting.length} waiting, ${speed} tokens/s`;
  const cache = `${used.length} of ${engine.blocks} blocks of ${engine.block_size} tokens in use, `
    + `${Object.values(engine.references).filter((count) => count > 1).length} shared, ${engine.kept} kept for later prompts`;
  return [node("p", { textContent: line }), node("table", {}, node("tbody", {}, ...rows)), node("p", { className: "quiet", textContent: cache }), blocks];
}

export async function watch() {
  try {
    const now = performance.now(), { engines } = await ask("/api/engine");
    const speeds = engines.map((engine, index) => rate(engine, index, now));
    before = { time: now, generated: engines.map((engine) => engine.generated) };
    place.replaceChildren(...engines.flatMap((engine, index) => drawn(engine, speeds[index])));
  } catch (error) {
    place.textContent = error.message;
  }
  setTimeout(watch, document.hidden ? 5000 : 500);
}
