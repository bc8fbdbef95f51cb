// The request of the page in other forms: a link, curl, Python, and the command.
import { KNOBS } from "./next.js";

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
const url = (settings) => `${location.origin}/v1/${settings.messages ? "chat/completions" : "completions"}`;
const OURS = ["top_k", "min_p", "repetition_penalty", "edits"]; // fields that the openai package does not know

export const COPIES = {
  link: (settings) => `${location.origin}/#${encodeURIComponent(JSON.stringify(settings))}`,
  curl: (settings) => `curl ${url(settings)} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(settings))}`,
  python: (settings) => {
    const own = Object.fromEntries(OURS.filter((name) => settings[name] !== undefined).map((name) => [name, settings[name]]));
    const body = Object.fromEntries(Object.entries(settings).filter(([name]) => !OURS.includes(name)));
    if (Object.keys(own).length) body.extra_body = own;
    const words = Object.entries(body).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ");
    const [kind, text] = settings.messages ? ["chat.completions", "message.content"] : ["completions", "text"];
    return `import openai\nclient = openai.OpenAI(base_url="${location.origin}/v1", api_key="...")\nprint(client.${kind}.create(${words}).choices[0].${text})\n`;
  },
  onward: ({ model: _, prompt, messages, max_tokens, edits, ...rest }, folder) => {
    if (messages) throw new Error("onward chat asks for its messages: copy a conversation as curl or Python");
    if (edits) throw new Error("onward generate switches nothing off: copy this request as curl or Python");
    const words = Object.entries({ temperature: 1, ...rest }).map(([name, value]) => `--${name.replaceAll("_", "-")} ${value}`).join(" ");
    return `onward generate ${quoted(folder)} ${quoted(prompt)} --max-new-tokens ${max_tokens} ${words}`;
  },
};

// The settings of a link; null if it has none, or is none of ours.
export function settingsOf(hash) {
  try {
    const { model, prompt, messages, max_tokens, seed, edits, ...rest } = JSON.parse(decodeURIComponent(hash.slice(1)));
    const knobs = Object.fromEntries(KNOBS.map(([name]) => [name, rest[name]]));
    const fields = Object.entries({ model, prompt, max_tokens, seed, ...knobs }).filter(([, value]) => value !== undefined);
    return { fields, edits, messages: Array.isArray(messages) ? messages : null };
  } catch {
    return null;
  }
}
