// The server: requests with the key of the page, and streams.
import { at } from "./dom.js";
import { readHere, writeHere } from "./storage.js";

const NO_SERVER = "The server does not answer: check that it runs, then try again.";
const BROKEN = "The server stopped in the middle of the answer: continue when it runs again.";
const STORED = "onward.key";
const aborted = (error) => error.name === "AbortError";
let key = readHere(STORED) ?? "";

export function useKey(given) {
  key = given;
  writeHere(STORED, key);
}

export async function send(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`; // in UTF-8
  const request = body === undefined ? { headers, signal } : { method: "POST", headers, signal, body: JSON.stringify(body) };
  const reply = await fetch(path, request).catch((error) => { throw aborted(error) ? error : new Error(NO_SERVER); });
  if (reply.ok) return reply;
  const error = await reply.json().catch(() => null);
  at("key-form").hidden &&= reply.status !== 401;
  throw Object.assign(new Error(error?.error?.message ?? `The server answers with status ${reply.status}.`), { status: reply.status });
}

export const ask = async (path, body, signal) => (await send(path, body, signal)).json();

export async function* stream(path, body, signal) {
  const reader = (await send(path, { ...body, stream: true }, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  const read = () => reader.read().catch((error) => { throw aborted(error) ? error : new Error(BROKEN); });
  for (let rest = ""; ;) {
    const { done, value } = await read();
    if (done) throw new Error(BROKEN);
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const one = JSON.parse(data);
      if (one.error) throw new Error(one.error.message);
      yield one;
    }
  }
}
