// Attention: lines from one token to the tokens that a head reads, and the weights of all heads as rows.
import { ask } from "./api.js";
import { at, legible, listbox, node, quoted, shade } from "./dom.js";
import { rolesOf } from "./parts.js";

const LEAST = 0.02; // smallest weight that has a line
const MOST_LINES = 40;
let given = null, weights = [], roles = [], from = 0;

const head = () => [Number(at("layer").value), Number(at("head").value)];

export async function showAttention(text, signal) {
  given = text;
  roles = await rolesOf(text.model, signal);
  fill("layer", roles.length, (index) => `layer ${index}`);
  fillHeads();
  await read(text.tokens.length - 1, signal);
}

// Give a chooser `count` options, from 0. Its choice stays the same or, if it is no longer an option, becomes the
// last one.
function fill(id, count, label) {
  const before = Math.min(Number(at(id).value), count - 1);
  at(id).replaceChildren(...Array.from({ length: count }, (_, index) => node("option", { value: index, textContent: label(index) })));
  at(id).value = before;
}

const fillHeads = () => fill("head", roles[head()[0]].length, (index) => `head ${index}${roles[head()[0]][index] ? `: ${roles[head()[0]][index]}` : ""}`);

async function read(position, signal) {
  ({ weights } = await ask("/api/attention", { model: given.model, tokens: given.tokens, position, edits: given.edits }, signal));
  from = position;
  const spans = given.texts.map((text, index) => {
    const span = node("span", { className: "token", textContent: legible(text).replaceAll("\n", "↵\n") });
    span.setAttribute("aria-label", `token ${index + 1}: ${legible(text) || "nothing"}`);
    return span;
  });
  at("attention-text").replaceChildren(...spans);
  listbox(at("attention-text"), spans, from, "Tokens of the text", async (index, byKey) => {
    await read(index, signal);
    if (byKey) at("attention-text").children[index]?.focus();
  });
  draw();
  at("attention-text").children[from]?.scrollIntoView({ block: "nearest" });
}

function draw() {
  const [layer, number] = head(), row = weights[layer]?.[number] ?? [];
  at("attention-from").textContent = `From ${quoted(given.texts[from])}, token ${from + 1}`
    + (from === given.tokens.length - 1 ? ", after which the chosen token came." : ".");
  [...at("attention-text").children].forEach((span, index) => {
    shade(span, index > from ? 0 : row[index] ?? 0);
    span.className = index === from ? "token from" : "token";
    span.title = index > from ? "comes later: not read" : (row[index] ?? 0).toFixed(3);
  });
  const best = row.map((weight, index) => [weight, index]).sort((one, other) => other[0] - one[0]);
  at("attention-best").textContent = row.length
    ? `It reads ${best.slice(0, 3).filter(([weight]) => weight >= LEAST).map(([weight, index]) => `${quoted(given.texts[index])} (${weight.toFixed(2)})`).join(", ")}.`
    : "This layer has no attention.";
  drawLines(best.slice(0, MOST_LINES).filter(([weight]) => weight >= LEAST));
  drawMaps(layer, number);
}

// One curve per weight, from the token to the one that it reads, behind the text.
function drawLines(best) {
  const svg = at("lines"), spans = at("attention-text").children, frame = at("attention-text").getBoundingClientRect();
  const top = (index) => {
    const box = [...spans[index].getClientRects()].at(-1) ?? frame; // a space may be on the line before
    return [box.left + box.width / 2 - frame.left, box.top - frame.top + 4];
  };
  svg.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  svg.style.width = `${frame.width}px`;
  svg.style.height = `${frame.height}px`;
  const [x, y] = top(from);
  const most = best[0]?.[0] ?? 1;
  svg.replaceChildren(...best.filter(([, index]) => index !== from).map(([weight, index]) => {
    const line = document.createElementNS(svg.namespaceURI, "path"), [left, above] = top(index);
    const rise = above === y ? Math.min(18, 8 + Math.abs(x - left) / 12) : 14;
    line.setAttribute("d", `M ${x} ${y} C ${x} ${y - rise}, ${left} ${above - rise}, ${left} ${above}`);
    line.setAttribute("stroke-width", 1 + 4 * weight);
    line.setAttribute("opacity", 0.2 + (0.8 * weight) / most);
    return line;
  }));
}

// All heads as rows, all tokens as columns; the chosen head has a mark at its left.
function drawMaps(layer, number) {
  const canvas = at("maps"), rows = weights.flat(), scale = window.devicePixelRatio || 1, left = 8;
  const height = Math.min(10, Math.max(2, Math.floor(300 / rows.length))), width = canvas.clientWidth;
  [canvas.width, canvas.height] = [width * scale, (height * rows.length + weights.length) * scale];
  canvas.style.height = `${canvas.height / scale}px`;
  canvas.setAttribute("aria-label", `Attention of ${rows.length} heads to ${from + 1} tokens; layer ${layer} head ${number} is marked`);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = getComputedStyle(canvas).color;
  let top = 0;
  const tops = [];
  weights.forEach((heads, i) => {
    heads.forEach((row, j) => {
      tops.push([top, i, j]);
      pen.globalAlpha = 1;
      if (i === layer && j === number) pen.fillRect(0, top, left - 3, height);
      const column = (width - left) / row.length;
      row.forEach((weight, k) => {
        pen.globalAlpha = Math.sqrt(weight);
        pen.fillRect(left + k * column, top, column, height);
      });
      top += height;
    });
    top++;
  });
  canvas.onclick = (event) => {
    const [, i, j] = tops.findLast(([above]) => above <= event.offsetY) ?? [0, 0, 0];
    at("layer").value = i;
    fillHeads();
    at("head").value = j;
    draw();
  };
}

at("layer").oninput = () => { fillHeads(); draw(); };
at("head").oninput = draw;
new ResizeObserver(() => { if (given && weights.length && at("attention-text").clientWidth) draw(); }).observe(at("attention-view"));
