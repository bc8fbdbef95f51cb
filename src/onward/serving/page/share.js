// The request of an answer in other formats: a link, a curl command, Python code, and an onward command.
import { KNOBS } from "./options.js";

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const url = (request) => `${location.origin}/v1/${request.messages ? "chat/completions" : "completions"}`;
const OURS = ["top_k", "min_p", "repetition_penalty", "edits"]; // fields that the openai package does not know

// JSON as Python writes it.
const python = (value) => JSON.stringify(value).replace(/"(?:[^"\\]|\\.)*"|\b(?:true|false|null)\b/g,
  (part) => ({ true: "True", false: "False", null: "None" })[part] ?? part);

export const COPIES = {
  link: (request) => `${location.origin}/#${encodeURIComponent(JSON.stringify(request))}`,
  curl: (request) => `curl ${url(request)} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(request))}`,
  Python: (request) => {
    const own = Object.fromEntries(OURS.filter((name) => request[name] !== undefined).map((name) => [name, request[name]]));
    const body = Object.fromEntries(Object.entries(request).filter(([name]) => !OURS.includes(name)));
    if (Object.keys(own).length) body.extra_body = own;
    const words = Object.entries(body).map(([name, value]) => `${name}=${python(value)}`).join(", ");
    const [kind, text] = request.messages ? ["chat.completions", "message.content"] : ["completions", "text"];
    return `import openai\nclient = openai.OpenAI(base_url="${location.origin}/v1", api_key="...")\nprint(client.${kind}.create(${words}).choices[0].${text})\n`;
  },
  command: ({ model: _, prompt, messages, max_tokens, edits, stop, ...rest }, folder) => {
    if (messages) throw new Error("onward chat asks for its messages: copy a conversation as curl or Python.");
    if (edits) throw new Error("onward generate switches nothing off: copy this request as curl or Python.");
    const words = Object.entries({ temperature: 1, ...rest }).map(([name, value]) => `--${name.replaceAll("_", "-")} ${value}`);
    if (stop) words.push(`--stop ${quoted(stop[0])}`);
    return `onward generate ${quoted(folder)} ${quoted(prompt)} --max-new-tokens ${max_tokens} ${words.join(" ")}`;
  },
};

const isMessage = (one) => typeof one?.content === "string" && ["system", "user", "assistant"].includes(one.role);

// The request of a link: { model, prompt, system, talk, edits, options }; null if the link holds no such request.
export function requestOf(hash) {
  try {
    const { model, prompt, messages, edits, ...options } = JSON.parse(decodeURIComponent(hash.slice(1)));
    if (messages === undefined && prompt === undefined) return null;
    if (prompt !== undefined && typeof prompt !== "string") return null;
    const talk = messages ?? [], system = talk[0]?.role === "system" ? talk[0].content : "", rest = talk.slice(system ? 1 : 0);
    if (!rest.every((one, index) => isMessage(one) && one.role === (index % 2 ? "assistant" : "user"))) return null;
    if (messages && rest.length % 2 === 0) return null;
    const known = ["max_tokens", "seed", "stop", ...KNOBS.map(([name]) => name)];
    return { model, prompt, system, talk: messages && rest, edits, options: Object.fromEntries(known.map((name) => [name, options[name]])) };
  } catch {
    return null;
  }
}
