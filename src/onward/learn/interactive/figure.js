// Functions that the scripts of all figures share. A script adds to `kinds` a function that fills a figure from its numbers.
const kinds = {}

const node = (name, attributes = {}, ...children) => {
  const made = document.createElement(name)
  for (const key in attributes) made.setAttribute(key, attributes[key])
  made.append(...children)
  return made
}
// An SVG element, or an element inside one.
const drawn = (name, attributes = {}, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name)
  for (const key in attributes) made.setAttribute(key, attributes[key])
  made.append(...children)
  return made
}
let controls = 0
// A slider with a label, over a range or over `stops`; `text` formats its value.
const slider = (parent, name, { stops, min = 0, max = stops.length - 1, step = 1, value, text = String }, changed) => {
  const id = `interactive-${++controls}`
  const input = node("input", { type: "range", id, min, max, step }), output = node("span", { class: "value", "aria-hidden": "true" })  // the slider itself announces the value
  const say = () => {
    output.textContent = text(made.value)
    input.setAttribute("aria-valuetext", output.textContent)
  }
  const made = {
    input,
    get value() { return stops ? stops[+input.value] : +input.value },
    set value(number) { input.value = stops ? nearest(number) : number; say() },
    restop(list) { const old = made.value; stops = list; input.max = list.length - 1; made.value = old },
  }
  const nearest = number => stops.reduce((best, stop, i) => Math.abs(stop - number) < Math.abs(stops[best] - number) ? i : best, 0)
  input.oninput = () => { changed(); say() }
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
// A row of a table: a name, a bar for `share` over a pale bar for `before`, and texts.
const barRow = ({ name, share = 0, before = 0, texts, cut = false, less = false }) => {
  const bar = node("i", less ? { class: "less" } : {})
  bar.style.setProperty("--share", share)
  bar.style.setProperty("--before", before)
  return node("tr", cut ? { class: "cut" } : {}, node("th", { scope: "row" }, name), node("td", { class: "bar" }, bar),
    ...texts.map(text => node("td", {}, text)))
}
const percent = share => share >= .001 || !share ? (100 * share).toFixed(1) + "\u00a0%" : "<\u00a00.1\u00a0%"
const grouped = number => number.toLocaleString("en-US", { maximumFractionDigits: 0 })
const count = (number, name) => `${grouped(number)} ${name}${number === 1 ? "" : "s"}`

// Draw now, and again when the width of an element changes.
const resized = (element, draw) => {
  let width = 0
  new ResizeObserver(() => {
    if (width !== element.clientWidth) draw()
    width = element.clientWidth
  }).observe(element)
  draw()
}
// The axes of a plot as wide as its parent, and functions that draw in it.
const axes = (parent, { label, height = 200, x, y, xTicks, yTicks, xName, yName, xText = grouped, yText = grouped }) => {
  const width = Math.max(240, parent.clientWidth), [left, right, top, bottom] = [52, 12, 22, 40]
  const across = value => left + (value - x[0]) / (x[1] - x[0]) * (width - left - right)
  const up = value => height - bottom - (value - y[0]) / (y[1] - y[0]) * (height - top - bottom)
  const svg = drawn("svg", { class: "axes", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label })
  const text = (px, py, words, anchor, style = "") => svg.append(drawn("text", { x: px, y: py, "text-anchor": anchor, class: style }, words))
  const line = (points, style) => svg.append(drawn("path", { class: style, d: points.map(([a, b], i) => `${i ? "L" : "M"}${across(a).toFixed(1)} ${up(b).toFixed(1)}`).join("") }))
  const circle = (style, r) => (a, b) => svg.append(drawn("circle", { class: style, cx: across(a).toFixed(1), cy: up(b).toFixed(1), r }))
  for (const tick of yTicks) { line([[x[0], tick], [x[1], tick]], "tick"); text(left - 6, up(tick) + 4, yText(tick), "end") }
  for (const tick of xTicks) text(across(tick), height - bottom + 19, xText(tick), "middle")
  text(left, 12, yName, "start", "title")
  text(width - right, height - 6, xName, "end", "title")
  parent.replaceChildren(svg)
  return { line, dot: circle("dot", 5), ring: circle("ring", 8), text: (a, b, words, anchor = "start") => text(across(a) + (anchor === "end" ? -3 : 4), up(b) - 4, words, anchor) }
}

queueMicrotask(() => document.querySelectorAll("figure.interactive").forEach(figure => {
  const body = node("div", { class: "body" }), data = JSON.parse(figure.querySelector("script").textContent)
  figure.querySelector(".off").replaceWith(body)
  kinds[figure.dataset.kind](body, data)
}))
// In a notebook, the page of a figure is in an iframe, which gets the height of the page.
if (window.frameElement?.srcdoc) new ResizeObserver(() => {
  window.frameElement.style.height = document.documentElement.getBoundingClientRect().height + 4 + "px"
}).observe(document.body)
