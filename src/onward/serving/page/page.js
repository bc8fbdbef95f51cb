// The page: a text as a tree of tokens, the knobs of sampling, and what a chosen token shows.
import { ask, node, stream } from "./api.js";
import { watch } from "./engine.js";
import { edits, loadParts, look } from "./inside.js";

const at = (id) => document.getElementById(id);
const KNOBS = [["temperature", 0, 2, 0.05, 1], ["top_k", 0, 100, 1, 0], ["top_p", 0.05, 1, 0.01, 1], ["min_p", 0, 1, 0.01, 0],
  ["repetition_penalty", 1, 2, 0.05, 1], ["frequency_penalty", 0, 2, 0.1, 0], ["presence_penalty", 0, 2, 0.1, 0]];
let prompt = [], pieces = [], leaf = null, chosen = null, running = null, looking = null;
// A node of the tree: { token, text, p, parent, children }; the root has no token.
let root = { children: [] };

const path = (end) => { const nodes = []; for (let one = end; one?.parent; one = one.parent) nodes.unshift(one); return nodes; };
const say = (message) => { at("status").textContent = message; };
const knob = (name) => Number(at(name).value);

function options() {
  const given = {};
  for (const [name, , , , neutral] of KNOBS) if (knob(name) !== neutral) given[name] = knob(name);
  return given;
}

function child(parent, token, text, p) {
  let found = parent.children.find((one) => one.token === token);
  if (!found) parent.children.push(found = { token, text, p, parent, children: [] });
  return found;
}

function draw() {
  const nodes = path(leaf);
  at("text").replaceChildren(node("span", { textContent: at("prompt").value }), ...nodes.map((one, index) => {
    const made = node("button", { className: one === chosen ? "token on" : "token", textContent: one.text.replaceAll("\n", "↵\n"), title: one.p.toFixed(3) });
    made.setAttribute("aria-label", `token ${index + 1}: ${one.text}, probability ${one.p.toFixed(3)}`);
    made.style.setProperty("--p", one.p);
    made.onclick = made.onfocus = () => choose(one);
    return made;
  }));
  const leaves = [];
  const visit = (one) => (one.children.length ? one.children.forEach(visit) : one.parent && leaves.push(one));
  visit(root);
  at("branches").replaceChildren(...(leaves.length > 1 ? leaves : []).map((one, index) => {
    const made = node("button", { textContent: `branch ${index + 1}` });
    made.setAttribute("aria-pressed", "false");
    made.disabled = one === leaf;
    made.onclick = () => { leaf = one; chosen = null; draw(); };
    return made;
  }));
}

async function complete(from) {
  running?.abort();
  const own = running = new AbortController();
  at("stop").disabled = false;
  say("");
  try {
    const ids = [...prompt, ...path(from).map((one) => one.token)];
    const body = { model: at("model").value, prompt: ids, max_tokens: knob("max_tokens"), seed: knob("seed"), logprobs: 1, return_token_ids: true, edits: edits(), ...options() };
    leaf = from;
    for await (const { choices: [choice] } of stream("/v1/completions", body, own.signal)) {
      choice.token_ids.forEach((token, index) => {
        leaf = child(leaf, token, choice.logprobs.tokens[index], Math.exp(choice.logprobs.token_logprobs[index]));
      });
      draw();
    }
    say(`${path(leaf).length} tokens`);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  } finally {
    if (running === own) at("stop").disabled = true;
  }
}

async function start() {
  try {
    const body = { model: at("model").value, prompt: at("prompt").value, return_token_strs: true };
    ({ tokens: prompt, token_strs: pieces } = await ask("/tokenize", body));
    root = { children: [] };
    chosen = null;
    await complete(root);
    history.replaceState(null, "", link());
    if (!chosen && path(leaf).length) choose(path(leaf)[0]);
  } catch (error) {
    say(error.message);
  }
}

async function choose(one) {
  if (one === chosen) return;
  chosen = one;
  [...at("text").querySelectorAll("button")].forEach((made, index) => made.classList.toggle("on", path(leaf)[index] === one));
  await distribution();
  await inside();
}

const before = () => [...prompt, ...path(chosen.parent).map((one) => one.token)];

async function distribution() {
  if (!chosen) return;
  const parent = chosen.parent, taken = chosen.token;
  const reply = await ask("/api/distribution", { model: at("model").value, tokens: before(), prompt_length: prompt.length, ...options() });
  at("kept").textContent = `${reply.kept} of ${reply.vocabulary} tokens can be sampled`;
  at("next").tBodies[0].replaceChildren(...reply.rows.map((row) => {
    const take = node("button", { textContent: JSON.stringify(row.text), disabled: row.token === taken });
    take.onclick = () => { chosen = null; complete(child(parent, row.token, row.text, row.before)); };
    const bar = (p) => {
      const made = node("i", { className: "bar" });
      made.style.setProperty("--p", p);
      return node("td", {}, made, p.toFixed(3));
    };
    return node("tr", {}, node("td", {}, take), bar(row.before), bar(row.after));
  }));
}

async function inside() {
  if (!chosen) return;
  looking?.abort();
  looking = new AbortController();
  const tokens = before().slice(-512);
  try {
    const all = [...pieces, ...path(chosen.parent).map((one) => one.text)].slice(-512);
    await look({ model: at("model").value, tokens }, all, chosen.token, looking.signal);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  }
}

const settings = () => ({ model: at("model").value, prompt: at("prompt").value, max_tokens: knob("max_tokens"), seed: knob("seed"), ...options() });
const link = () => `${location.origin}/#${encodeURIComponent(JSON.stringify(settings()))}`;
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const COPIES = {
  link,
  curl: () => `curl ${location.origin}/v1/completions -H "Content-Type: application/json" -d ${quoted(JSON.stringify(settings()))}`,
  python: () => {
    const { top_k, min_p, repetition_penalty, ...known } = settings();
    const body = { ...known, extra_body: { top_k, min_p, repetition_penalty } };
    const words = Object.entries(body).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ");
    return `import openai\nclient = openai.OpenAI(base_url="${location.origin}/v1", api_key="...")\nprint(client.completions.create(${words}).choices[0].text)\n`;
  },
  onward: () => {
    const { model: _, prompt: text, max_tokens, ...rest } = settings();
    const words = Object.entries({ temperature: 1, ...rest }).map(([name, value]) => `--${name.replaceAll("_", "-")} ${value}`).join(" ");
    return `onward generate ${quoted(at("model").selectedOptions[0].title)} ${quoted(text)} --max-new-tokens ${max_tokens} ${words}`;
  },
};

for (const [name, low, high, step, neutral] of KNOBS) {
  const value = node("output", { textContent: neutral });
  const input = node("input", { id: name, type: "range", min: low, max: high, step, value: neutral });
  input.oninput = () => { value.textContent = input.value; distribution().catch((error) => say(error.message)); };
  at("knobs").append(node("label", {}, node("span", { textContent: name.replaceAll("_", " ") }), input, value));
}
at("go").onclick = start;
at("stop").onclick = () => running?.abort();
at("model").onchange = () => loadParts(at("model").value).catch((error) => say(error.message));
document.addEventListener("edited", () => { if (prompt.length) start(); });
for (const made of document.querySelectorAll("[data-copy]")) {
  made.onclick = async () => { await navigator.clipboard.writeText(COPIES[made.dataset.copy]()); say("copied"); };
}

async function open() {
  try {
    const { data } = await ask("/v1/models");
    at("model").replaceChildren(...data.map(({ id, root: folder }) => node("option", { textContent: id, title: folder })));
    if (location.hash) {
      for (const [name, value] of Object.entries(JSON.parse(decodeURIComponent(location.hash.slice(1))))) {
        const field = ["model", "prompt", "max_tokens", "seed", ...KNOBS.map(([known]) => known)].includes(name) && at(name);
        if (field) { field.value = value; field.dispatchEvent(new Event("input")); }
      }
    }
    await loadParts(at("model").value);
    say("");
    watch();
  } catch (error) {
    say(error.message);
  }
}
at("key").onchange = open;
at("key-label").onsubmit = (event) => event.preventDefault();
open();
