// What the scripts of all figures share. A script adds a function to `kinds`, which fills a figure from its numbers.
const kinds = {}

const node = (name, attributes = {}, ...children) => {
  const made = document.createElement(name)
  for (const key in attributes) made.setAttribute(key, attributes[key])
  made.append(...children)
  return made
}
// An SVG, or an element in one.
const drawn = (name, attributes = {}, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name)
  for (const key in attributes) made.setAttribute(key, attributes[key])
  made.append(...children)
  return made
}
let controls = 0
// A slider with a label; `text` turns its value into words.
const slider = (parent, name, { min, max, step = 1, value, text = String }, changed) => {
  const id = `interactive-${++controls}`
  const input = node("input", { type: "range", id, min, max, step }), output = node("span", { class: "value", "aria-hidden": "true" })  // the slider itself says it
  const say = () => {
    output.textContent = text(+input.value)
    input.setAttribute("aria-valuetext", output.textContent)
  }
  const made = {
    input,
    get value() { return +input.value },
    set value(number) { input.value = number; say() },
  }
  input.oninput = () => { say(); changed() }
  parent.append(node("label", { for: id }, name), input, output)
  made.value = value
  return made
}
// A menu with a label; its value is the index of an option.
const menu = (parent, name, options, changed) => {
  const id = `interactive-${++controls}`
  const input = node("select", { id }, ...options.map((option, i) => node("option", { value: i }, option)))
  input.onchange = changed
  parent.append(node("label", { for: id }, name), input)
  return { input, get value() { return +input.value } }
}
const button = (parent, name, pressed) => {
  const made = node("button", { type: "button" }, name)
  made.onclick = pressed
  parent.append(made)
  return made
}
// A row of a table: a name, a bar for `share` over a pale one for `before`, and texts.
const barRow = ({ name, share = 0, before = 0, texts, cut = false }) => {
  const bar = node("i", {})
  bar.style.setProperty("--share", share)
  bar.style.setProperty("--before", before)
  return node("tr", cut ? { class: "cut" } : {}, node("th", { scope: "row" }, name), node("td", { class: "bar" }, bar),
    ...texts.map(text => node("td", {}, text)))
}
const percent = share => share >= .001 || !share ? (100 * share).toFixed(1) + "\u00a0%" : "<\u00a00.1\u00a0%"
const grouped = number => number.toLocaleString("en-US", { maximumFractionDigits: 0 })
const count = (number, name) => `${grouped(number)} ${name}${number === 1 ? "" : "s"}`

queueMicrotask(() => document.querySelectorAll("figure.interactive").forEach(figure => {
  const body = node("div", { class: "body" }), data = JSON.parse(figure.querySelector("script").textContent)
  figure.querySelector(".off").replaceWith(body)
  kinds[figure.dataset.kind](body, data)
}))
// In a notebook, the page of a figure is a frame, which gets the height of the page.
if (window.frameElement?.srcdoc) new ResizeObserver(() => {
  window.frameElement.style.height = document.documentElement.getBoundingClientRect().height + 4 + "px"
}).observe(document.body)
