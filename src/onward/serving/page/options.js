// The sampling options: their names are those of the API. They are kept in this browser.
import { at, node } from "./dom.js";
import { parsed, read, write } from "./storage.js";

const STORED = "onward.options";
export const KNOBS = [
  ["temperature", 0, 2, 0.05, 1, "0: always the likeliest token"],
  ["top_k", 0, 100, 1, 0, "only the k likeliest tokens"],
  ["top_p", 0.05, 1, 0.01, 1, "only the likeliest tokens that reach p together"],
  ["min_p", 0, 1, 0.01, 0, "only tokens with at least this share of the likeliest one's probability"],
  ["repetition_penalty", 1, 2, 0.05, 1, "makes tokens of the text less likely"],
  ["frequency_penalty", 0, 2, 0.1, 0, "makes a token less likely with each occurrence in the answer"],
  ["presence_penalty", 0, 2, 0.1, 0, "makes tokens that the answer already has less likely"],
];
const FIELDS = [
  ["max_tokens", "number", "512", "maximum number of tokens of an answer, which Continue extends"],
  ["seed", "number", "", "the same seed gives the same answer; empty: a new seed each time"],
  ["stop", "text", "", "a text that ends the answer; \\n is a line break"],
];
const neutral = Object.fromEntries([...KNOBS.map(([name, , , , value]) => [name, String(value)]), ...FIELDS.map(([name, , value]) => [name, value])]);

// The options that differ from their defaults, as fields of a request.
export const knobs = () => Object.fromEntries(KNOBS.filter(([name]) => at(name).value !== neutral[name]).map(([name]) => [name, Number(at(name).value)]));

// All fields of a request's sampling. Raises an Error for a field without a usable value.
export function sampling() {
  const count = Number(at("max_tokens").value), seed = at("seed").value;
  if (!Number.isInteger(count) || count < 1) throw new Error("max_tokens is not a whole number from 1: change it in the options.");
  if (seed && !(Number.isInteger(Number(seed)) && Number(seed) >= 0)) throw new Error("seed is not a whole number from 0: change it in the options.");
  const stop = at("stop").value.replaceAll("\\n", "\n");
  return { max_tokens: count, seed: seed ? Number(seed) : newSeed(), ...knobs(), ...(stop ? { stop: [stop] } : {}) };
}

export const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;

function summarize() {
  const set = Object.keys(neutral).filter((name) => at(name).value !== neutral[name]).map((name) => `${name} ${at(name).value}`);
  at("options-set").textContent = set.length ? set.join(", ") : `max_tokens ${neutral.max_tokens}`;
  at("reset").hidden = !set.length;
  for (const [name] of KNOBS) at(`${name}-value`).textContent = name !== "temperature" && at(name).value === neutral[name] ? "off" : at(name).value;
}

// Set options by name, the others to their defaults.
export function setOptions(given) {
  for (const [name, value] of Object.entries(neutral)) at(name).value = given[name] ?? value;
  if (Array.isArray(given.stop)) at("stop").value = given.stop.join("").replaceAll("\n", "\\n");
  at("options").dispatchEvent(new Event("input"));
}

// `changed` is called when an option changes.
export function makeOptions(changed) {
  const row = (name, input, about, ...more) => {
    input.setAttribute("aria-describedby", `${name}-about`);
    return node("div", { className: "option" }, node("label", { htmlFor: name, textContent: name }), input, ...more,
      node("small", { id: `${name}-about`, textContent: about }));
  };
  at("option-list").append(
    ...KNOBS.map(([name, min, max, step, value, about]) => row(name, node("input", { id: name, type: "range", min, max, step, value }), about,
      node("output", { id: `${name}-value`, htmlFor: name }))),
    ...FIELDS.map(([name, type, value, about]) => row(name, node("input", { id: name, type, value, ...(type === "number" ? { min: name === "seed" ? 0 : 1 } : {}) }), about)),
  );
  at("options").addEventListener("input", () => {
    summarize();
    write(STORED, JSON.stringify(Object.fromEntries(Object.keys(neutral).map((name) => [name, at(name).value]))));
    changed();
  });
  at("reset").onclick = () => setOptions({});
  setOptions(parsed(read(STORED), {}));
}
