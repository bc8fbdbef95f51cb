// Conversations: { id, title, mode, system, updated, turns: [{ prompt, answers, shown }] }, kept in this browser.
// An answer is { root, leaf, text, error, model, system, settings }, and what `prepare` adds to it.
import { all, packed, unpacked } from "./tree.js";

const PREFIX = "onward.conversation.";
const FULL = "Cannot keep this conversation, because the browser's storage is full: delete others.";
const heads = new Map(); // id -> { id, title, updated }

export const newConversation = (mode) => ({ id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", mode, system: "", updated: 0, turns: [] });
export const answerOf = (turn) => turn.answers[turn.shown];

function flat({ root, leaf, error, model, system, settings }) {
  return { rows: packed(root), leaf: [...all(root)].indexOf(leaf), error, model, system, settings };
}

function full({ rows, leaf, ...rest }) {
  const nodes = unpacked(rows);
  const shown = nodes[leaf] ?? nodes[0];
  return { root: nodes[0], leaf: shown, text: shown.end?.text ?? "", ...rest };
}

export function save(conversation) {
  conversation.updated = Date.now();
  const turns = conversation.turns.map(({ prompt, answers, shown }) => ({ prompt, answers: answers.map(flat), shown }));
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify({ ...conversation, turns }));
  } catch {
    throw new Error(FULL);
  }
  heads.set(conversation.id, conversation);
}

// The kept conversations, the newest first; entries that this page cannot read are left alone.
export const kept = () => [...heads.values()].sort((one, other) => other.updated - one.updated);

export function refresh() {
  heads.clear();
  for (const name of Object.keys(localStorage)) {
    const found = name.startsWith(PREFIX) && parsed(localStorage.getItem(name));
    if (found) heads.set(found.id, { id: found.id, title: found.title, updated: found.updated });
  }
}

function parsed(text) {
  try {
    const found = JSON.parse(text);
    return typeof found.id === "string" && Array.isArray(found.turns) ? found : null;
  } catch {
    return null;
  }
}

export function load(id) {
  const found = parsed(localStorage.getItem(PREFIX + id));
  if (!found) throw new Error("This conversation cannot be read: delete it.");
  for (const turn of found.turns) turn.answers = turn.answers.map(full);
  return found;
}

// Forget a conversation; returns a function that brings it back.
export function remove(id) {
  const text = localStorage.getItem(PREFIX + id), head = heads.get(id);
  localStorage.removeItem(PREFIX + id);
  heads.delete(id);
  return () => {
    localStorage.setItem(PREFIX + id, text);
    heads.set(id, head);
  };
}

export function rename(id, title) {
  const text = parsed(localStorage.getItem(PREFIX + id));
  localStorage.setItem(PREFIX + id, JSON.stringify({ ...text, title }));
  heads.set(id, { ...heads.get(id), title });
}
