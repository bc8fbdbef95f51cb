// The page: its models, the conversation that is shown, and what its buttons do.
import { ask, useKey } from "./api.js";
import { at, copy, node, report, safely, say } from "./dom.js";
import { engineOf } from "./engine.js";
import { asked, generate, interrupt, newAnswer, outcome, written } from "./generate.js";
import { chosenNode, inspect, makeInside, refresh as refreshInside } from "./inside.js";
import { drawList, makeList } from "./list.js";
import { addTurn, drawAll, drawTurn, isAtEnd, markChosen, openEditor, setActs, setBusy, toEnd, versions } from "./log.js";
import { makeOptions, newSeed, sampling, setOptions } from "./options.js";
import { edits, makeParts, partsOf, switchOff } from "./parts.js";
import { COPIES, requestOf } from "./share.js";
import { parsed, read, write } from "./storage.js";
import { answerOf, copied, load, newConversation, save } from "./store.js";
import { child, path } from "./tree.js";

const VIEW = "onward.view"; // whether tokens are shown, by mode
const WIDE = matchMedia("(min-width: 64rem)");
const FRAME = 50; // milliseconds between drawings of an answer that grows
const models = new Map(); // name -> { folder, template, engine }
const tokensShown = { complete: true, chat: false, ...parsed(read(VIEW), {}) };
let conversation = newConversation("chat"), running = null; // { conversation, turn, answer, controller }

const model = () => at("model").value;
const view = () => ({ mode: conversation.mode, tokens: tokensShown[conversation.mode], chosen: chosenNode(), running: running?.answer });
const settings = () => ({ model: model(), ...sampling(), ...(edits() ? { edits: edits() } : {}) });
const last = () => conversation.turns.at(-1);
const turnOf = (token) => conversation.turns.find((turn) => answerOf(turn) && path(answerOf(turn).leaf).includes(token)); // among the versions shown

function useModel() {
  partsOf(model());
  engineOf(models.get(model()).engine);
}

const keep = safely((own = conversation) => {
  if (own.deleted) return;
  own.title ||= own.turns[0]?.prompt.trim().slice(0, 80) || "Untitled";
  save(own);
  drawList(conversation.id);
});

function redraw() {
  drawAll(conversation, view());
  for (const input of document.querySelectorAll("#mode input")) input.checked = input.value === conversation.mode;
  for (const input of document.querySelectorAll("#show input")) input.checked = (input.value === "tokens") === tokensShown[conversation.mode];
  const chat = conversation.mode === "chat";
  at("system-fold").hidden = !chat;
  at("system").value = conversation.system;
  at("system-set").textContent = conversation.system.trim() ? "set" : "none";
  at("go").textContent = chat ? "Send" : "Complete";
  at("prompt").placeholder = chat ? "Write a message" : "Begin a text";
  at("prompt").setAttribute("aria-label", chat ? "Message" : "Prompt");
  at("mode-line").textContent = !chat ? "The model continues the text that you write."
    : models.get(model())?.template === false ? "This model has no chat template: messages become “User:” and “Assistant:”, which a base model may not follow."
      : "You write messages, and the model answers.";
  at("welcome-name").textContent = model();
  drawRunning();
  toEnd();
}

function drawRunning() {
  const follow = isAtEnd();
  at("go").hidden = running !== null;
  at("halt").hidden = running === null;
  setBusy(running !== null);
  const end = last() && answerOf(last())?.leaf?.end;
  at("room").textContent = end?.length ? `${end.used} of ${end.length} tokens of context` : "";
  if (follow) toEnd(); // the line makes the log lower
}

function show(own) {
  conversation = own;
  inspect(null, null, null, null);
  redraw();
  drawList(conversation.id);
  refreshInside();
  if (!WIDE.matches) toggle("list", false);
}

const begin = (mode = conversation.mode) => {
  show(newConversation(mode));
  at("prompt").focus();
};

// If an earlier turn is changed, the conversation continues in a copy up to that turn, so that nothing is lost.
function reach(turn) {
  if (turn === last()) return;
  conversation = copied(conversation, conversation.turns.indexOf(turn) + 1);
  redraw();
  say("This is a copy up to the changed message: the whole conversation is still in the list.");
  return last();
}

// Generate an answer of `turn` after the token `from`; after the root, this gives a new version.
async function answer(turn, own, from, given) {
  running?.controller.abort();
  const run = running = { conversation, turn, answer: own, controller: new AbortController() };
  let drawn = 0, timer = 0;
  const shown = () => run.conversation === conversation;
  const draw = () => {
    drawn = performance.now();
    timer = 0;
    if (shown()) drawTurn(turn, view());
  };
  own.leaf = from;
  if (!turnOf(chosenNode())) inspect(null, null, null, null);
  drawTurn(turn, view());
  drawRunning();
  keep();
  await generate(conversation, turn, own, from, given, run.controller.signal, () => {
    timer ||= setTimeout(draw, Math.max(0, FRAME - (performance.now() - drawn)));
  });
  clearTimeout(timer);
  if (running === run) running = null;
  at("told").textContent = own.error || outcome(own.leaf.end) || "The answer is complete.";
  if (shown()) {
    drawTurn(turn, view());
    drawRunning();
    if (chosenNode()) refreshInside("chosen");
    else chooseFirst();
  }
  keep(run.conversation);
}

function newVersion(turn, given) {
  turn.answers.push(newAnswer(conversation, given));
  turn.shown = turn.answers.length - 1;
  return answer(turn, answerOf(turn), answerOf(turn).root, given);
}

// Answer a turn again: as a version of its answer if model and system message are the same, else as a new answer.
async function regenerate(turn, given = { ...settings(), seed: newSeed() }) {
  turn = reach(turn) ?? turn;
  const own = answerOf(turn), before = own && versions(turn).length;
  if (own?.model !== given.model || own.system !== conversation.system.trim()) return newVersion(turn, given);
  await answer(turn, own, own.root, given);
  if (!own.error && own.leaf.end.reason !== "stopped" && versions(turn).length === before && own.leaf.parent) say("The same answer has come again.");
}

async function send() {
  const text = at("prompt").value, given = settings();
  if (!text.trim()) return say(conversation.mode === "chat" ? "Write a message first." : "Write the beginning of a text first.");
  at("prompt").value = "";
  fit();
  say();
  const turn = { prompt: conversation.mode === "chat" ? text.trim() : text, answers: [], shown: -1 };
  conversation.turns.push(turn);
  inspect(null, null, null, null);
  addTurn(turn, view());
  await newVersion(turn, given);
}

function choose(turn, one) {
  const own = answerOf(turn);
  inspect(conversation, turn, own, one, async (_, of, parent, row) => {
    at("chosen").focus(); // the pressed button is created again
    await take(turn, of, parent, row);
  });
  markChosen(turn, one);
  if (!WIDE.matches && at("inside").hidden) toggle("inside", true);
}

// If tokens are shown beside the panel, the first token of the last answer is chosen, as an example of the panel's views.
function chooseFirst() {
  const turn = last(), own = turn && answerOf(turn);
  if (own?.leaf.parent && tokensShown[conversation.mode] && !at("inside").hidden) choose(turn, path(own.leaf)[0]);
}

// Go on with another token after `parent`, which becomes the chosen one.
async function take(turn, own, parent, row) {
  const place = path(parent).length, copied = reach(turn);
  if (copied) {
    [turn, own] = [copied, answerOf(copied)];
    parent = path(own.leaf)[place - 1] ?? own.root;
  }
  const one = child(parent, row.token, row.text, row.before);
  own.leaf = one;
  choose(turn, one);
  await answer(turn, own, one, { ...settings(), model: own.model });
}

function step(turn, by) {
  const all = versions(turn), place = all.findIndex(([, leaf]) => leaf === answerOf(turn).leaf) + by;
  if (!all[place]) return;
  const [own, leaf] = all[place];
  Object.assign(own, { leaf, text: leaf.end?.text ?? "" });
  turn.shown = turn.answers.indexOf(own);
  inspect(null, null, null, null);
  drawTurn(turn, view());
  keep();
}

setActs({
  choose,
  regenerate: safely((turn) => { say(); return regenerate(turn); }),
  proceed: safely((turn) => {
    say();
    turn = reach(turn) ?? turn;
    const own = answerOf(turn);
    return answer(turn, own, own.leaf, { ...settings(), model: own.model });
  }),
  previous: (turn) => step(turn, -1),
  next: (turn) => step(turn, 1),
  share: safely((turn, form) => {
    const own = answerOf(turn), { model: name, ...given } = own.leaf.end?.settings ?? own.settings;
    return copy(COPIES[form]({ model: name, ...asked(conversation, turn, own), ...given }, models.get(name)?.folder ?? name));
  }),
  edit: (turn) => openEditor(turn, conversation.mode === "chat" ? ".asked" : ".text", turn.prompt, conversation.mode === "chat" ? "Send again" : "Complete again",
    turn === last() ? "" : "The messages after it stay in a copy.", safely(async (text) => {
      const given = settings();
      if (!text.trim()) return say("Write a text first.");
      turn = reach(turn) ?? turn;
      Object.assign(turn, { prompt: text, answers: [], shown: -1 });
      inspect(null, null, null, null);
      await newVersion(turn, given);
    }), () => drawTurn(turn, view())),
  editAnswer: (turn) => openEditor(turn, ":scope > .text", answerOf(turn).text, "Keep", "Continue then continues the changed text.", safely(async (text) => {
    turn = reach(turn) ?? turn;
    turn.answers.push(await written(conversation, turn, text, { ...settings(), model: answerOf(turn).model }));
    turn.shown = turn.answers.length - 1;
    inspect(null, null, null, null);
    redraw();
    keep();
  }), () => drawTurn(turn, view())),
});

function fit() {
  at("prompt").style.height = "auto";
  at("prompt").style.height = `${Math.min(at("prompt").scrollHeight + 2, innerHeight / 3)}px`;
}

function toggle(name, open) {
  at(name).hidden = !open;
  at(`${name}-toggle`).setAttribute("aria-expanded", String(open));
  if (name === "inside") refreshInside();
  if (!WIDE.matches && open) toggle(name === "inside" ? "list" : "inside", false);
}

for (const name of ["list", "inside"]) {
  at(`${name}-toggle`).onclick = () => toggle(name, at(name).hidden);
  toggle(name, WIDE.matches);
}
at("inside-close").onclick = () => {
  toggle("inside", false);
  at("inside-toggle").focus();
};
at("box").onsubmit = (event) => {
  event.preventDefault();
  if (!running) safely(send)();
};
at("halt").onclick = () => {
  running?.controller.abort();
  at("prompt").focus();
};
at("new").onclick = () => begin();
at("prompt").oninput = fit;
at("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.isComposing || event.shiftKey || running) return;
  if (conversation.mode === "complete" && !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  safely(send)();
};
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.target.closest?.(".editor, #kept")) return;
  if (running) running.controller.abort();
  else if (!WIDE.matches) toggle("list", false);
});
at("system").onchange = () => {
  conversation.system = at("system").value;
  at("system-set").textContent = conversation.system.trim() ? "set" : "none";
  if (conversation.turns.length) keep();
};
at("mode").onchange = (event) => {
  if (conversation.turns.length) begin(event.target.value);
  else conversation.mode = event.target.value;
  redraw();
};
at("show").onchange = (event) => {
  tokensShown[conversation.mode] = event.target.value === "tokens";
  write(VIEW, JSON.stringify(tokensShown));
  const top = at("log").scrollTop;
  redraw();
  at("log").scrollTop = top;
  if (!chosenNode() && !running) chooseFirst();
};
at("model").onchange = () => {
  useModel();
  if (!conversation.turns.length) conversation.mode = models.get(model()).template ? "chat" : "complete";
  redraw();
};
at("key-form").onsubmit = (event) => {
  event.preventDefault();
  useKey(at("key").value);
  open();
};
addEventListener("pagehide", () => {
  if (!running) return;
  interrupt(running.answer);
  keep(running.conversation);
});

makeOptions(() => refreshInside("next"));
makeList(safely((id) => { if (id !== conversation.id) show(running?.conversation.id === id ? running.conversation : load(id)); }), (id) => {
  if (running?.conversation.id === id) {
    running.conversation.deleted = true;
    running.controller.abort();
  }
  if (conversation.id === id) show(newConversation(conversation.mode));
}, (id, title) => { for (const own of [conversation, running?.conversation]) if (own?.id === id) own.title = title; });
makeParts(() => {});
makeInside((by) => {
  const turn = turnOf(chosenNode());
  const nodes = turn ? path(answerOf(turn).leaf) : [], next = nodes[nodes.indexOf(chosenNode()) + by];
  if (next) choose(turn, next);
});
at("again").onclick = safely(async () => {
  const turn = last(), own = turn && answerOf(turn);
  if (!own || running) throw new Error(running ? "An answer is being written: stop it first." : "There is no answer yet: write a message first.");
  await regenerate(turn, { ...settings(), model: own.model, seed: (own.leaf.end?.settings ?? own.settings).seed });
});

async function fromLink() {
  const request = requestOf(location.hash);
  if (location.hash.length > 1) history.replaceState(null, "", location.pathname);
  if (!request) return;
  if (models.has(request.model)) at("model").value = request.model;
  setOptions(request.options);
  useModel();
  switchOff(request.edits);
  const own = newConversation(request.talk ? "chat" : "complete");
  own.system = request.system;
  for (const { role, content } of request.talk ?? []) {
    if (role === "user") own.turns.push({ prompt: content, answers: [], shown: -1 });
    else Object.assign(own.turns.at(-1), { shown: 0, answers: [await written(own, own.turns.at(-1), content, settings())] });
  }
  show(own);
  if (request.talk) return regenerate(last(), settings());
  at("prompt").value = request.prompt;
  fit();
}

async function open() {
  try {
    const { data } = await ask("/v1/models");
    at("key-form").hidden = true;
    const info = await Promise.all(data.map(({ id }) => ask(`/tokenizer_info?model=${encodeURIComponent(id)}`)));
    data.forEach(({ id, root, parent }, index) => models.set(id, { folder: root, template: info[index].chat_template !== null, engine: parent ?? id }));
    at("model").replaceChildren(...data.map(({ id }) => node("option", { textContent: id })));
    useModel();
    conversation.mode = models.get(model()).template ? "chat" : "complete";
    show(conversation);
    say();
    await fromLink();
  } catch (error) {
    report(error);
    if (error.status === 503) setTimeout(open, 1000); // the server loads its models
  }
}
open();
