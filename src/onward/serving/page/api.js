// The server: requests with the key of the page, and streams.

export const node = (name, options = {}, ...children) => {
  const made = Object.assign(document.createElement(name), options);
  made.append(...children);
  return made;
};

const key = document.getElementById("key");

export async function send(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  const request = body === undefined ? { headers, signal } : { method: "POST", headers, signal, body: JSON.stringify(body) };
  const reply = await fetch(path, request);
  if (reply.ok) return reply;
  if (reply.status === 401) document.getElementById("key-label").hidden = false;
  const error = await reply.json().catch(() => null);
  throw new Error(error?.error?.message ?? `status ${reply.status}`);
}

export const ask = async (path, body, signal) => (await send(path, body, signal)).json();

export async function* stream(path, body, signal) {
  const reader = (await send(path, { ...body, stream: true }, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
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
