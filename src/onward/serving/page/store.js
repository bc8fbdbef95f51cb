// Conversations: { id, title, mode, system, updated, turns: [{ prompt, answers, shown }] }, kept in this browser.
// An answer is { root, leaf, text, error, model, system, settings }, and the fields that `prepare` adds.
import { forget, names, parsed, read, write } from "./storage.js";
import { all, packed, unpacked } from "./tree.js";

const PREFIX = "onward.conversation.";
const FULL = "Cannot keep this conversation, because the browser's storage is full or closed: delete others.";
const heads = new Map(); // id -> { id, title, updated }

const newId = () => crypto.getRandomValues(new Uint32Array(3)).join("-");
export const newConversation = (mode) => ({ id: newId(), title: "", mode, system: "", updated: 0, turns: [] });
export const answerOf = (turn) => turn.answers[turn.shown];

// A conversation as it is stored in JSON, with trees as lists.
function flat(conversation, turns = conversation.turns) {
  const answer = ({ root, leaf, error, model, system, settings }) =>
    ({ rows: packed(root), leaf: [...all(root)].indexOf(leaf), error, model, system, settings });
  return { ...conversation, turns: turns.map(({ prompt, answers, shown }) => ({ prompt, answers: answers.map(answer), shown })) };
}

function full(conversation) {
  for (const turn of conversation.turns) {
    turn.answers = turn.answers.map(({ rows, leaf, ...rest }) => {
      const nodes = unpacked(rows), shown = nodes[leaf] ?? nodes[0];
      return { root: nodes[0], leaf: shown, text: shown.end?.text ?? "", ...rest };
    });
  }
  return conversation;
}

// Another conversation with the first `count` turns of this one.
export const copied = (conversation, count) =>
  full({ ...structuredClone(flat(conversation, conversation.turns.slice(0, count))), id: newId(), title: `${conversation.title} (copy)` });

export function save(conversation) {
  conversation.updated = Date.now();
  if (!write(PREFIX + conversation.id, JSON.stringify(flat(conversation)))) throw new Error(FULL);
  heads.set(conversation.id, conversation);
}

// The kept conversations, the newest first; entries that this page cannot read are left alone.
export const kept = () => [...heads.values()].sort((one, other) => other.updated - one.updated);

const kind = (found) => (typeof found?.id === "string" && typeof found.title === "string" && Array.isArray(found.turns) ? found : null);

export function refresh() {
  heads.clear();
  for (const name of names()) {
    const found = name.startsWith(PREFIX) && kind(parsed(read(name)));
    if (found) heads.set(found.id, { id: found.id, title: found.title, updated: found.updated });
  }
}

export function load(id) {
  try {
    return full(kind(parsed(read(PREFIX + id))));
  } catch {
    throw new Error("This conversation cannot be read: delete it.");
  }
}

// Delete a stored conversation; return a function that restores it.
export function remove(id) {
  const text = read(PREFIX + id), head = heads.get(id);
  forget(PREFIX + id);
  heads.delete(id);
  return () => {
    write(PREFIX + id, text);
    heads.set(id, head);
  };
}

export function rename(id, title) {
  write(PREFIX + id, JSON.stringify({ ...parsed(read(PREFIX + id)), title }));
  heads.set(id, { ...heads.get(id), title });
}
