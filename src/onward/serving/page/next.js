// The next token: the knobs of sampling, and the distribution before and after them.
import { ask, node } from "./api.js";

const at = (id) => document.getElementById(id);
export const KNOBS = [["temperature", 0, 2, 0.05, 1], ["top_k", 0, 100, 1, 0], ["top_p", 0.05, 1, 0.01, 1], ["min_p", 0, 1, 0.01, 0],
  ["repetition_penalty", 1, 2, 0.05, 1], ["frequency_penalty", 0, 2, 0.1, 0], ["presence_penalty", 0, 2, 0.1, 0]];
let asking = null;

export function options() {
  const given = {};
  for (const [name, , , , neutral] of KNOBS) if (Number(at(name).value) !== neutral) given[name] = Number(at(name).value);
  return given;
}

export function makeKnobs(changed) {
  for (const [name, low, high, step, neutral] of KNOBS) {
    const shown = () => (name !== "temperature" && Number(input.value) === neutral ? "off" : input.value);
    const value = node("output");
    const input = node("input", { id: name, type: "range", min: low, max: high, step, value: neutral });
    value.textContent = shown();
    input.oninput = () => { value.textContent = shown(); changed(); };
    at("knobs").append(node("label", {}, node("span", { textContent: name.replaceAll("_", " ") }), input, value));
  }
}

function bar(p, most) {
  const made = node("i", { className: "bar" });
  made.style.setProperty("--p", p / most);
  return node("td", {}, made, p ? p.toFixed(3) : "cut");
}

// Draw the distribution in which `taken` was drawn; `take` is called with the row of another token.
export async function distribution(body, taken, take) {
  asking?.abort();
  asking = new AbortController();
  const reply = await ask("/api/distribution", { ...body, ...options() }, asking.signal);
  at("kept").textContent = `${reply.kept} of ${reply.vocabulary} tokens can be sampled`;
  const most = Math.max(...reply.rows.flatMap((row) => [row.before, row.after]));
  at("next").tBodies[0].replaceChildren(...reply.rows.map((row) => {
    const made = node("button", { textContent: JSON.stringify(row.text), disabled: row.token === taken });
    made.onclick = () => take(row);
    return node("tr", { className: row.after ? "" : "cut" }, node("td", {}, made), bar(row.before, most), bar(row.after, most));
  }));
}
