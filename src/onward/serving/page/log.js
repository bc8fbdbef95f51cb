// The conversation as it is shown: for each turn the question, the answer as text or tokens, its figures and buttons.
import { at, button, copy, legible, listbox, node, safely, shade } from "./dom.js";
import { canContinue, outcome, split } from "./generate.js";
import { markdown } from "./markdown.js";
import { answerOf } from "./store.js";
import { leaves, path } from "./tree.js";

const made = new Map(); // turn -> its element
let acts = {}; // the buttons' functions by name; each is called with a turn

export const setActs = (given) => { acts = given; };

const act = (name, label, turn, title = "") => button(label, () => acts[name](turn), { title, className: "act" });

// The versions of all answers of a turn: [answer, leaf].
export const versions = (turn) => turn.answers.flatMap((answer) => {
  const found = leaves(answer.root, answer.leaf);
  return (found.length ? found : [answer.leaf]).map((leaf) => [answer, leaf]);
});

function tokenList(turn, answer, chosen) {
  const nodes = path(answer.leaf), place = nodes.indexOf(chosen);
  const tokens = nodes.map((one, index) => {
    const known = one.p === null ? "probability unknown" : `probability ${one.p.toFixed(3)}`;
    const span = node("span", { className: "token", textContent: legible(one.text).replaceAll("\n", "↵\n"), title: known });
    span.setAttribute("aria-label", `token ${index + 1}: ${legible(one.text) || "nothing"}, ${known}`);
    return shade(span, one.p ?? 0);
  });
  const list = node("span", { className: "tokens" }, ...tokens);
  listbox(list, tokens, place, "Tokens of the answer", (index, byKey) => {
    acts.choose(turn, nodes[index]);
    if (byKey) made.get(turn).querySelector("[aria-selected=true]")?.focus();
  });
  return list;
}

function body(turn, answer, { mode, tokens, chosen }) {
  if (mode === "complete") {
    const text = tokens && answer?.leaf.parent ? tokenList(turn, answer, chosen) : answer?.text ?? "";
    return node("div", { className: "text plain", dir: "auto" }, node("span", { className: "given", textContent: turn.prompt }), text);
  }
  if (tokens && answer.leaf.parent) return node("div", { className: "text plain", dir: "auto" }, tokenList(turn, answer, chosen));
  const [reasoning, content] = split(answer.text);
  const thought = reasoning ? [node("details", { className: "thought", open: !content }, node("summary", { textContent: "Reasoning" }), ...markdown(reasoning))] : [];
  return node("div", { className: "text", dir: "auto" }, ...thought, ...markdown(content));
}

function figures(answer, end) {
  if (!end?.tokens) return end ? outcome(end) : "";
  const parts = [answer.model, `${end.tokens} ${end.tokens === 1 ? "token" : "tokens"}`];
  if (end.speed) parts.push(`${end.speed.toFixed(end.speed < 10 ? 1 : 0)} tokens/s`);
  if (end.first) parts.push(`first after ${(end.first / 1000).toFixed(2)} s`);
  if (end.edited) parts.push("written by you");
  else if (outcome(end)) parts.push(outcome(end));
  return parts.join(" · ");
}

// A button, and the row that it shows: the request of an answer in several formats.
function shared(turn, end) {
  const buttons = ["link", "curl", "Python", "command"].map((name) => button(name, () => acts.share(turn, name)));
  const note = end?.whole ? "" : "It gives another text: this version was continued, or changed by hand.";
  const row = node("div", { className: "row share", hidden: true }, node("small", { textContent: "Copy the request of this answer as" }), ...buttons, node("small", { textContent: note }));
  const opener = button("Share", () => {
    row.hidden = !row.hidden;
    row.scrollIntoView({ block: "nearest" });
    opener.setAttribute("aria-expanded", String(!row.hidden));
  }, { className: "act", title: "Copy the request" });
  opener.setAttribute("aria-expanded", "false");
  return [opener, row];
}

function footer(turn, answer, { mode, running, isLast }) {
  const row = node("div", { className: "row acts" });
  if (running === answer) return node("p", { className: "figures", textContent: "writing …" });
  const end = answer.leaf.end, all = versions(turn), place = all.findIndex(([, leaf]) => leaf === answer.leaf);
  if (all.length > 1) {
    row.append(node("span", { className: "versions" }, act("previous", "‹", turn, "Previous version"), `${place + 1} of ${all.length}`, act("next", "›", turn, "Next version")));
    row.querySelector("[title^=Previous]").disabled = !isLast || place === 0; // later answers follow the version that is shown
    row.querySelector("[title^=Next]").disabled = !isLast || place === all.length - 1;
  }
  row.append(button("Copy", safely(() => copy(mode === "complete" ? turn.prompt + answer.text : split(answer.text)[1])), { className: "act", title: "Copy the text" }));
  if (canContinue(end) && answer.leaf.parent) row.append(act("proceed", "Continue", turn, "Continue this answer"));
  const changing = [act("regenerate", answer.text || answer.leaf.parent ? "Regenerate" : "Try again", turn, "Another answer, with a new seed"), act("editAnswer", mode === "chat" ? "Edit" : "Edit answer", turn, "Change the answer's text")];
  if (mode === "complete") changing.push(act("edit", "Edit prompt", turn, "Change this text, and complete it again"));
  const [share, forms] = shared(turn, end);
  row.append(...changing, share);
  return node("div", {}, node("p", { className: "figures", textContent: figures(answer, end) }), row, forms);
}

function element(turn, view) {
  const answer = answerOf(turn), made = node("article", { className: `turn ${view.mode}` });
  if (view.mode === "chat") {
    const own = [button("Copy", safely(() => copy(turn.prompt)), { className: "act", title: "Copy the message" }), act("edit", "Edit", turn, "Change this message, and send it again")];
    made.append(node("div", { className: "asked" }, node("div", { className: "text plain", dir: "auto", textContent: turn.prompt }), node("div", { className: "row acts" }, ...own)));
    if (answer) made.append(body(turn, answer, view));
  } else {
    made.append(body(turn, answer, view));
  }
  if (answer?.error) made.append(node("p", { className: "error", textContent: answer.error }));
  if (answer) made.append(footer(turn, answer, view));
  made.setAttribute("aria-label", `${view.mode === "chat" ? "Message" : "Text"} ${view.number}`);
  return made;
}

export const isAtEnd = () => at("log").scrollHeight - at("log").scrollTop - at("log").clientHeight < 80;

export const toEnd = () => { at("log").scrollTop = at("log").scrollHeight; };

// Draw all turns of a conversation; `view` is { mode, tokens, chosen, running }.
export function drawAll(conversation, view) {
  made.clear();
  conversation.turns.forEach((turn, index) => made.set(turn, element(turn, { ...view, number: index + 1, isLast: turn === conversation.turns.at(-1) })));
  at("log").replaceChildren(...made.values());
  at("log").hidden = !made.size;
  at("welcome").hidden = made.size > 0;
}

// Disable the buttons that change an answer or a message while an answer is written.
export function setBusy(busy) {
  for (const one of at("log").querySelectorAll("[title^=Continue], [title^=Another], [title^=Change]")) one.disabled = busy;
}

// Draw a new last turn, and redraw the turn before it, which is no longer the last.
export function addTurn(turn, view) {
  const before = [...made.keys()].at(-1);
  made.set(turn, node("article"));
  at("log").append(made.get(turn));
  at("log").hidden = false;
  at("welcome").hidden = true;
  drawTurn(turn, view);
  if (before) drawTurn(before, view);
  toEnd();
}

// Redraw one turn; the element that had the focus in it keeps the focus.
export function drawTurn(turn, view) {
  const old = made.get(turn);
  const follow = isAtEnd(), focused = old.contains(document.activeElement) ? document.activeElement : null;
  const turns = [...made.keys()], fresh = element(turn, { ...view, number: turns.indexOf(turn) + 1, isLast: turn === turns.at(-1) });
  made.set(turn, fresh);
  old.replaceWith(fresh);
  if (focused?.className === "token") fresh.querySelector(".token[tabindex='0']")?.focus();
  else if (focused?.title) fresh.querySelector(`[title="${focused.title}"]:not(:disabled)`)?.focus();
  if (follow) toEnd();
}

// Mark the chosen token among those that are shown.
export function markChosen(turn, chosen) {
  for (const span of at("log").querySelectorAll("[aria-selected=true]")) [span.ariaSelected, span.tabIndex] = ["false", -1];
  const place = turn ? path(answerOf(turn).leaf).indexOf(chosen) : -1, spans = made.get(turn)?.querySelectorAll(".token") ?? [];
  if (!spans[place]) return;
  for (const span of spans) span.tabIndex = -1;
  [spans[place].ariaSelected, spans[place].tabIndex] = ["true", 0];
}

// Replace a text of a turn by a box in which it is changed; `done` is called with the new text, and `close` to redraw the turn.
export function openEditor(turn, selector, text, label, note, done, close) {
  if (made.get(turn).querySelector(".editor")) close();
  const box = node("textarea", { value: text, rows: Math.min(12, text.split("\n").length + 1), dir: "auto" });
  box.setAttribute("aria-label", label);
  const save = button(label, () => done(box.value), { className: "main" });
  box.onkeydown = (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save.click();
  };
  const editor = node("div", { className: "editor" }, box, node("div", { className: "row" }, save, button("Cancel", close), node("small", { textContent: note })));
  made.get(turn).querySelector(selector).replaceWith(editor);
  box.style.height = `${Math.min(box.scrollHeight + 4, innerHeight / 2)}px`;
  box.focus();
}
