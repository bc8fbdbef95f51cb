// The next token: its distribution in the model, and after the sampling options.
import { ask } from "./api.js";
import { at, legible, node as element } from "./dom.js";
import { knobs } from "./options.js";

function bar(p, most, cut) {
  const made = element("i", { className: "amount" });
  made.style.setProperty("--p", p / most);
  return element("td", {}, made, cut ? "cut" : p > 0 && p < 0.0005 ? "< 0.001" : p.toFixed(3));
}

// Show the distribution from which a token was drawn. When the user selects another token, `take` is called with its row.
export async function showNext({ model, tokens, promptLength, target, edits, node }, signal, take) {
  const reply = await ask("/api/distribution", { model, tokens, prompt_length: promptLength, target, edits, ...knobs() }, signal);
  const some = reply.kept === reply.vocabulary ? `All ${reply.vocabulary}` : `${reply.kept} of ${reply.vocabulary}`;
  at("sampled").textContent = `${some} tokens can be sampled with the options as they are set.`;
  const taken = new Set(node.parent.children.map((one) => one.token)); // in this or another version
  const most = Math.max(...reply.rows.flatMap((row) => [row.before, row.after]));
  at("next").tBodies[0].replaceChildren(...reply.rows.map((row) => {
    const own = row.token === target;
    const title = own ? "The chosen token" : taken.has(row.token) ? "Another version has this token; press to go on from it again" : "Go on with this token";
    const made = element("button", { type: "button", textContent: JSON.stringify(legible(row.text)), disabled: own, title, className: taken.has(row.token) ? "taken" : "" });
    made.onclick = () => take(row);
    return element("tr", { className: [row.after ? "" : "cut", own ? "own" : ""].join(" ").trim() }, element("td", {}, made), bar(row.before, most), bar(row.after, most, !row.after));
  }));
}
