// Markdown as elements. Text reaches the page as text nodes only, so that no HTML of a model becomes HTML of the page.
import { button, copy, node, safely } from "./dom.js";

const DEEPEST = 6; // largest depth of nested quotes, lists and emphasis
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const LINKED = /^https?:/i;
const INLINE = new RegExp([
  "\\\\([!-/:-@\\[-`{-~])", // an escaped character
  "(`+)(.+?)\\2(?!`)", // code
  "(\\*\\*|__)(?=\\S)(.+?)\\4", // bold
  "(?<![\\w*])\\*(?=[^\\s*])([^*]+)\\*(?!\\w)|(?<![\\w_])_(?=[^\\s_])([^_]+)_(?!\\w)", // italic
  "~~(?=\\S)(.+?)~~", // struck out
  "!?\\[([^\\[\\]]*)\\]\\(\\s*<?([^\\s()<>]+(?:\\([^\\s()]*\\)[^\\s()<>]*)?)>?[^()]{0,200}\\)", // a link, or a picture, which becomes a link
  "<?(https?:[^\\s<>]*[^\\s<>.,;:!?'\")\\]}])>?", // an address
].join("|"), "gs");

function link(text, address) {
  if (!LINKED.test(address) || !URL.canParse(address)) return text;
  return node("a", { href: address, textContent: text || address, target: "_blank", rel: "noopener noreferrer nofollow" });
}

export function inline(text, depth = 0) {
  const parts = [];
  let done = 0;
  const inner = (given) => (depth < DEEPEST ? inline(given, depth + 1) : [given]);
  for (const found of text.matchAll(INLINE)) {
    const [whole, escaped, , code, , bold, italic, other, struck, title, target, address] = found;
    if (found.index > done) parts.push(text.slice(done, found.index));
    done = found.index + whole.length;
    if (escaped) parts.push(escaped);
    else if (code !== undefined) parts.push(node("code", { textContent: code.trim() || code }));
    else if (bold) parts.push(node("strong", {}, ...inner(bold)));
    else if (italic ?? other) parts.push(node("em", {}, ...inner(italic ?? other)));
    else if (struck) parts.push(node("s", {}, ...inner(struck)));
    else if (target) parts.push(LINKED.test(target) ? link(title, target) : whole);
    else parts.push(link(address, address));
  }
  return done < text.length ? [...parts, text.slice(done)] : parts;
}

function codeBlock(lines, language) {
  const text = lines.join("\n");
  const head = node("div", { className: "code-head" }, node("span", { textContent: language || "code" }), button("Copy", safely(() => copy(text))));
  return node("div", { className: "code" }, head, node("pre", { tabIndex: 0 }, node("code", { textContent: text })));
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
const isTable = (line, next) => line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(next ?? "") && cells(line).length === cells(next).length;

function table(rows) {
  const row = (line, kind) => node("tr", {}, ...cells(line).map((cell) => node(kind, kind === "th" ? { scope: "col" } : {}, ...inline(cell))));
  return node("div", { className: "wide", tabIndex: 0 },
    node("table", {}, node("thead", {}, row(rows[0], "th")), node("tbody", {}, ...rows.slice(2).map((line) => row(line, "td")))));
}

// Items, each with its lines: the lines that are indented deeper than the item, or follow it without an empty line.
function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]), ordered = /\d/.test(mark), items = [];
  let inner = 0;
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length < indent.length + 2 && /\d/.test(found[2]) === ordered) {
      inner = line.length - found[3].length;
      items.push([found[3]]);
    } else {
      items.at(-1).push(line.slice(Math.min(inner, /^\s*/.exec(line)[0].length)));
    }
  }
  const made = node(ordered ? "ol" : "ul", {}, ...items.map((item) => node("li", {}, ...blocks(item, depth + 1, true))));
  if (ordered) made.start = parseInt(mark, 10);
  return made;
}

// The elements of lines; in a `tight` item of a list a paragraph has no element of its own.
function blocks(lines, depth, tight = false) {
  if (depth > DEEPEST) return [lines.join("\n")];
  const made = [];
  let at = 0;
  const take = (more) => {
    const first = at++;
    while (at < lines.length && more(lines[at], lines[at + 1])) at++;
    return lines.slice(first, at);
  };
  const begins = (line, next) => FENCE.test(line) || RULE.test(line) || ITEM.test(line) || /^\s*(#{1,6}\s|>)/.test(line) || isTable(line, next);
  while (at < lines.length) {
    const line = lines[at], fence = FENCE.exec(line), heading = /^\s*(#{1,6})\s+(.*?)\s*#*\s*$/.exec(line);
    if (!line.trim()) {
      at++;
    } else if (fence) {
      const body = take((one) => !one.trim().startsWith(fence[1]) || one.trim().replaceAll(fence[1][0], "")).slice(1);
      at++; // its end, which an unfinished answer lacks
      made.push(codeBlock(body, fence[2]));
    } else if (heading) {
      at++;
      made.push(node("h3", { className: `level-${heading[1].length}` }, ...inline(heading[2])));
    } else if (RULE.test(line)) {
      at++;
      made.push(node("hr"));
    } else if (/^\s*>/.test(line)) {
      made.push(node("blockquote", {}, ...blocks(take((one) => /^\s*>/.test(one)).map((one) => one.replace(/^\s*> ?/, "")), depth + 1)));
    } else if (isTable(line, lines[at + 1])) {
      made.push(table(take((one) => one.includes("|"))));
    } else if (ITEM.test(line)) {
      const ordered = /\d/.test(ITEM.exec(line)[2]), indent = ITEM.exec(line)[1].length;
      made.push(list(take((one, next) => {
        const item = ITEM.exec(one);
        if (item && item[1].length <= indent && /\d/.test(item[2]) !== ordered) return false;
        return item || /^\s/.test(one) || (one.trim() ? !begins(one, next) && lines[at - 1].trim() : ITEM.test(next ?? "") || /^\s+\S/.test(next ?? ""));
      }), depth));
    } else {
      const text = inline(take((one, next) => one.trim() && !begins(one, next)).join("\n").trim());
      made.push(...(tight ? text : [node("p", { dir: "auto" }, ...text)]));
    }
  }
  return made;
}

export const markdown = (text) => blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
