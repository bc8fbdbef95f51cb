// The page: a text or a conversation, its tokens, and what the chosen one shows.
import { ask, node, stream } from "./api.js";
import { watch } from "./engine.js";
import { edits, loadParts, look, switchOff } from "./inside.js";
import { distribution, makeKnobs, options } from "./next.js";
import { COPIES, settingsOf } from "./share.js";
import { child, clear, draw, mark, path, tree } from "./tree.js";

const at = (id) => document.getElementById(id);
const MOST = 512; // tokens that are looked into
let prompt = [], pieces = [], stop = [], messages = [], running = null, looking = null;

const say = (message) => { at("status").textContent = message; };
const report = (error) => { if (error.name !== "AbortError") say(error.message); };
const model = () => at("model").value;
const chatting = () => at("mode").value === "chat";
const redraw = () => draw(chatting() ? "" : at("prompt").value, choose);

function settings() {
  const given = { model: model(), max_tokens: Number(at("max_tokens").value), seed: Number(at("seed").value), ...options() };
  if (edits()) given.edits = edits();
  return chatting() ? { messages, ...given } : { prompt: at("prompt").value, ...given };
}

async function complete(from) {
  running?.abort();
  const own = running = new AbortController();
  at("stop").disabled = false;
  say("");
  try {
    const { messages: _, ...given } = settings();
    const body = { ...given, prompt: [...prompt, ...path(from).map((one) => one.token)], stop, logprobs: 1, return_token_ids: true };
    tree.leaf = from;
    for await (const { choices: [choice] } of stream("/v1/completions", body, own.signal)) {
      choice.token_ids.forEach((token, index) => {
        tree.leaf = child(tree.leaf, token, choice.logprobs.tokens[index], Math.exp(choice.logprobs.token_logprobs[index]));
      });
      redraw();
    }
    say(`${path(tree.leaf).length} tokens`);
  } catch (error) {
    report(error);
  } finally {
    if (running === own) at("stop").disabled = true;
  }
}

async function read() {
  const body = chatting() ? { messages } : { prompt: at("prompt").value };
  ({ tokens: prompt, token_strs: pieces, stop = [] } = await ask("/tokenize", { model: model(), return_token_strs: true, ...body }));
  clear();
  await complete(tree.root);
  history.replaceState(null, "", COPIES.link(settings()));
  if (!tree.chosen && path(tree.leaf).length) await choose(path(tree.leaf)[0]);
}

async function answer() {
  const tokens = path(tree.leaf).map((one) => one.token);
  const { content } = tokens.length ? await ask("/detokenize", { model: model(), tokens }) : { content: "" };
  return stop.reduce((text, end) => text.split(end)[0], content).trim();
}

async function start() {
  try {
    if (chatting()) {
      const message = at("prompt").value.trim();
      if (!message) return say("write a message first");
      if (messages.length) messages.push({ role: "assistant", content: await answer() });
      messages.push({ role: "user", content: message });
      at("prompt").value = "";
      drawMessages();
    }
    await read();
  } catch (error) {
    report(error);
  }
}

function drawMessages() {
  at("messages").hidden = at("new").hidden = !chatting();
  at("prompt-label").textContent = chatting() ? "Message" : "Prompt";
  at("go").textContent = chatting() ? "Send" : "Complete";
  at("messages").replaceChildren(...messages.map(({ role, content }) => node("p", {}, node("b", { textContent: role }), " ", content)));
}

async function choose(one) {
  if (one === tree.chosen) return;
  tree.chosen = one;
  mark();
  try {
    await next();
    await inside();
  } catch (error) {
    report(error);
  }
}

const before = () => [...prompt, ...path(tree.chosen.parent).map((one) => one.token)];

async function next() {
  if (!tree.chosen) return;
  const { parent, token } = tree.chosen;
  await distribution({ model: model(), tokens: before().slice(-MOST), prompt_length: Math.min(prompt.length, MOST) }, token, (row) => {
    tree.chosen = null;
    complete(child(parent, row.token, row.text, row.before));
  });
}

async function inside() {
  looking?.abort();
  looking = new AbortController();
  const texts = [...pieces, ...path(tree.chosen.parent).map((one) => one.text)];
  await look({ model: model(), tokens: before().slice(-MOST) }, texts.slice(-MOST), tree.chosen.token, looking.signal);
}

function renew() {
  [prompt, messages] = [[], []];
  clear();
  drawMessages();
  redraw();
}

makeKnobs(() => next().catch(report));
at("go").onclick = start;
at("stop").onclick = () => running?.abort();
at("new").onclick = at("mode").onchange = renew;
at("model").onchange = () => loadParts(model()).catch(report);
at("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey || (chatting() && !event.shiftKey))) return;
  event.preventDefault();
  start();
};
document.addEventListener("edited", () => { if (prompt.length) read().catch(report); });
for (const made of document.querySelectorAll("[data-copy]")) {
  made.onclick = async () => {
    try {
      await navigator.clipboard.writeText(COPIES[made.dataset.copy](settings(), at("model").selectedOptions[0].title));
      say("copied");
    } catch (error) {
      report(error);
    }
  };
}

async function open() {
  try {
    const { data } = await ask("/v1/models");
    at("model").replaceChildren(...data.map(({ id, root: folder }) => node("option", { textContent: id, title: folder })));
    const given = settingsOf(location.hash);
    for (const [name, value] of given?.fields ?? []) {
      at(name).value = value;
      at(name).dispatchEvent(new Event("input"));
    }
    await loadParts(model());
    switchOff(given?.edits);
    if (given?.messages) [at("mode").value, messages] = ["chat", given.messages];
    drawMessages();
    say("");
    watch();
    if (messages.length) await read();
  } catch (error) {
    report(error);
  }
}
at("key").onchange = open;
at("key-label").onsubmit = (event) => event.preventDefault();
open();
