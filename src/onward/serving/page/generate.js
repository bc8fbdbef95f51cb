// An answer: the request that asks for it, its stream of tokens, and its figures.
import { ask, stream } from "./api.js";
import { answerOf } from "./store.js";
import { child, newRoot, path } from "./tree.js";

const THOUGHT = /^\s*(?:<think>|\[THINK\])?([^]*?)(?:<\/think>|\[\/THINK\])/;
const THINKING = /^\s*(?:<think>|\[THINK\])([^]*)$/;

export function newAnswer(conversation, settings) {
  const root = newRoot();
  return { root, leaf: root, text: "", error: "", model: settings.model, system: conversation.system.trim(), settings };
}

// [reasoning, answer] of a text whose reasoning is between tags.
export function split(text) {
  const done = THOUGHT.exec(text);
  if (done) return [done[1].trim(), text.slice(done[0].length).trimStart()];
  const open = THINKING.exec(text);
  return open ? [open[1].trim(), ""] : ["", text];
}

function said(text) {
  const [reasoning, content] = split(text);
  return { role: "assistant", content: content.trim(), ...(reasoning ? { reasoning_content: reasoning } : {}) };
}

// The request for an answer of `turn`: a prompt, or the messages up to this turn.
export function asked(conversation, turn, { system: own }) {
  if (conversation.mode === "complete") return { prompt: turn.prompt };
  const before = conversation.turns.slice(0, conversation.turns.indexOf(turn));
  const system = own ? [{ role: "system", content: own }] : [];
  const talk = before.flatMap((one) => [{ role: "user", content: one.prompt }, said(answerOf(one)?.text ?? "")]);
  return { messages: [...system, ...talk, { role: "user", content: turn.prompt }] };
}

// Give an answer its prompt as token ids and as pieces of text, with the stop texts and the model's context length.
export async function prepare(conversation, turn, answer, signal) {
  if (answer.prompt) return;
  const body = { model: answer.model, return_token_strs: true, ...asked(conversation, turn, answer) };
  const { tokens, token_strs, stop = [], max_model_len } = await ask("/tokenize", body, signal);
  Object.assign(answer, { prompt: tokens, pieces: token_strs, stop, length: max_model_len });
}

// The text of tokens up to `leaf`, decoded after the last token of the prompt, since the first token of a text may lose
// its space.
async function textOf(answer, leaf, signal) {
  const tokens = path(leaf).map((one) => one.token), last = answer.prompt.slice(-1);
  if (!tokens.length) return "";
  const decoded = async (ids) => (ids.length ? (await ask("/detokenize", { model: answer.model, tokens: ids }, signal)).content : "");
  const [whole, before] = await Promise.all([decoded([...last, ...tokens]), decoded(last)]);
  return whole.slice(before.length);
}

// Continue `answer`, an answer of `turn`, after the token `from`; for a new version, `from` is the answer's root.
// `changed` is called after each piece. An error ends the answer and is kept in it; its tokens so far remain.
export async function generate(conversation, turn, answer, from, settings, signal, changed) {
  const end = { reason: "stopped", tokens: 0, speed: 0, first: 0, limit: settings.max_tokens, length: 0, full: false, settings, whole: !from.parent };
  const start = performance.now();
  let first = 0, last = 0;
  Object.assign(answer, { leaf: from, error: "" });
  try {
    await prepare(conversation, turn, answer, signal);
    const { messages: _, max_tokens, ...given } = settings;
    const prompt = [...answer.prompt, ...path(from).map((one) => one.token)], room = answer.length - prompt.length;
    if (!prompt.length) throw new Error("This model does not begin a text by itself: write its first words.");
    if (room < 1) throw new Error(`The context of ${answer.length} tokens is full: begin a new conversation, or shorten an earlier message.`);
    Object.assign(end, { limit: Math.min(max_tokens, room), full: room <= max_tokens, length: answer.length });
    end.settings = { ...settings, max_tokens: end.limit };
    answer.text = await textOf(answer, from, signal);
    const stop = [...answer.stop, ...settings.stop ?? []];
    const body = { ...given, prompt, max_tokens: end.limit, stop, logprobs: 1, return_token_ids: true };
    for await (const { choices: [choice] } of stream("/v1/completions", body, signal)) {
      last = performance.now();
      first ||= last;
      choice.token_ids.forEach((token, index) => {
        answer.leaf = child(answer.leaf, token, choice.logprobs.tokens[index], Math.exp(choice.logprobs.token_logprobs[index]));
      });
      answer.text += choice.text;
      end.tokens += choice.token_ids.length;
      if (choice.finish_reason) end.reason = choice.finish_reason;
      changed();
    }
    if (from.parent) answer.text = stop.reduce((text, one) => text.split(one)[0], await textOf(answer, answer.leaf, signal));
  } catch (error) {
    if (error.name !== "AbortError") [answer.error, end.reason] = [error.message, "error"];
  }
  if (first) end.first = first - start;
  if (last > first) end.speed = (1000 * (end.tokens - 1)) / (last - first);
  end.used = (answer.prompt?.length ?? 0) + path(answer.leaf).length;
  answer.leaf.end = { ...end, text: answer.text };
}

// Mark the version of an answer that is still being written as stopped: the page is about to be closed.
export function interrupt(answer) {
  answer.leaf.end ??= { reason: "stopped", tokens: path(answer.leaf).length, text: answer.text, settings: answer.settings, whole: false };
}

// How a version ended, in words.
export function outcome(end) {
  if (end.reason === "stop") return "";
  if (end.reason === "stopped") return "stopped by you";
  if (end.reason === "length") return end.full ? `the context of ${end.length} tokens is full` : `stopped at the limit of ${end.limit} tokens`;
  return "";
}

export const canContinue = (end) => end?.reason === "stopped" || end?.reason === "error" || (end?.reason === "length" && !end.full);

// An answer that the user has written: its tokens, whose probabilities are unknown.
export async function written(conversation, turn, text, settings) {
  const answer = { ...newAnswer(conversation, settings), text };
  await prepare(conversation, turn, answer);
  const body = { model: answer.model, content: text, add_special_tokens: false, return_token_strs: true };
  const { tokens, token_strs } = await ask("/tokenize", body);
  answer.leaf = tokens.reduce((leaf, token, index) => child(leaf, token, token_strs[index], null), answer.root);
  answer.leaf.end = { reason: "stopped", tokens: tokens.length, edited: true, settings, used: answer.prompt.length + tokens.length, length: answer.length, text };
  return answer;
}
