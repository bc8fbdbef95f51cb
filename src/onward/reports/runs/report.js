const byId = id => document.getElementById(id)
const show = (items, i) => [...items].forEach((item, j) => item.classList.toggle("on", i === j))
const percent = share => (100 * share).toFixed(0) + " %"

const AXES = ["step", "seconds", "tokens"]
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 })
const units = [
  step => "step " + step.toLocaleString("en"),
  seconds => seconds < 60 ? seconds.toPrecision(2) + " s" : seconds < 3600 ? `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`
    : `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60 % 60)} min`,
  tokens => compact.format(tokens) + " tokens",
]
const bold = text => Object.assign(document.createElement("b"), { textContent: text })

// Plots: Python draws them against steps; this script moves their points horizontally, and shows the values at the
// pointer.
const plots = [...document.querySelectorAll("figure.curve, figure.chart")].map(figure => {
  const data = JSON.parse(figure.querySelector("script").textContent), svg = figure.querySelector("svg")
  const ticks = svg.querySelector(".ticks"), paths = svg.querySelectorAll(".ticks ~ path")
  const readout = figure.querySelector(".readout"), many = figure.classList.contains("chart")
  const heights = [...paths].map(path => [...path.getAttribute("d").matchAll(/[ML][\d.-]+ ([\d.-]+)/g)].map(m => +m[1]))
  const [left, right] = data.x, [top, bottom] = data.y
  svg.insertAdjacentHTML("beforeend", `<line class="cursor" y1="${top}" y2="${bottom}"/><circle class="dot" r="3.5"/>`)
  const cursor = svg.querySelector(".cursor"), dot = svg.querySelector(".dot")
  let axis = 0, log = 0

  const x = place => {
    const [first, last] = data.domain[axis]
    const share = log ? Math.log(place / first) / Math.log(last / first) : (place - first) / (last - first)
    return left + Math.min(1, Math.max(0, share || 0)) * (right - left)
  }
  const draw = (newAxis, newLog) => {
    [axis, log] = [newAxis, newLog]
    paths.forEach((path, i) => {
      const places = data.places[data.series[i].places][axis]
      let j = 0
      path.setAttribute("d", path.getAttribute("d").replace(/([MLH])-?[\d.]+/g, (_, to) => to + x(places[j++ % places.length]).toFixed(1)))
    })
    if (svg.querySelector(".axis")) svg.querySelector(".axis").textContent = AXES[axis]
    ticks.innerHTML = data.ticks[AXES[axis]][log].map(([place, label]) =>
      `<text x="${x(place).toFixed(1)}" y="${bottom + 16}" text-anchor="middle">${label}</text>`).join("")
    mark()
  }
  const nearest = (places, px) => places.reduce((best, place, i) => Math.abs(x(place) - px) < Math.abs(x(places[best]) - px) ? i : best, 0)
  const read = (px, py) => {
    let found = []
    data.series.forEach((series, i) => {
      const places = data.places[series.places][axis]
      if (!series.name || !places.length) return
      if (px < x(places[0]) - 20 || px > x(places.at(-1)) + 20) return  // this curve begins later, or has ended
      const j = nearest(places, px)
      found.push({ i, j, series, distance: Math.abs(heights[i][j] - py) })
    })
    if (!found.length) return
    if (many) found = [found.reduce((a, b) => b.distance < a.distance ? b : a)]
    const { i, j, series } = many ? found[0] : found.find(one => one.series.name.startsWith("training")) ?? found[0]
    const places = data.places[series.places]
    svg.classList.add("pointed")
    cursor.setAttribute("x1", x(places[axis][j])); cursor.setAttribute("x2", x(places[axis][j]))
    dot.setAttribute("cx", x(places[axis][j])); dot.setAttribute("cy", heights[i][j])
    if (many) paths.forEach((path, k) => path.classList.toggle("lit", k === i && data.series.length > 2))
    const where = units.map((unit, a) => data.domain[a][1] > 0 ? unit(places[a][j]) : "").filter(Boolean)
    readout.replaceChildren(where.shift(), many || !where.length ? "" : ` (${where.join(", ")})`,
      ...found.flatMap(one => [` · ${one.series.name} `, bold(String(+one.series.values[one.j].toPrecision(4)))]))
  }
  svg.onpointermove = svg.onpointerdown = event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse())
    read(at.x, at.y)
  }
  const note = readout.textContent
  if (many) svg.onpointerleave = () => {
    readout.textContent = note
    svg.classList.remove("pointed")
    paths.forEach(path => path.classList.remove("lit"))
  }
  else read(right, 0)
  // a permanent line at the step of the shown sample
  const steps = data.places[0]?.[0] ?? []
  let marked = null
  const mark = step => {
    if (step !== undefined) marked = step
    if (marked === null || !steps.length) return
    const j = steps.reduce((best, at, i) => Math.abs(at - marked) < Math.abs(steps[best] - marked) ? i : best, 0)
    const line = svg.querySelector(".mark") ?? svg.insertBefore(cursor.cloneNode(), cursor)
    line.setAttribute("class", "mark")
    for (const end of ["x1", "x2"]) line.setAttribute(end, x(data.places[0][axis][j]))
  }
  const stepAt = px => steps[nearest(data.places[0][axis], px)]
  return { draw, mark, stepAt, svg, known: data.domain.map(([, last]) => last > 0) }
})
const choices = document.querySelectorAll(".choice input")
const chosen = name => +document.querySelector(`input[name=${name}]:checked`).value
choices.forEach(choice => {
  choice.disabled = choice.name === "axis" && !plots[0].known[choice.value]
  choice.onchange = () => plots.forEach(plot => plot.draw(chosen("axis"), chosen("scale")))
})

if (byId("samples")) {
  const samples = byId("samples").children, slider = byId("time"), button = byId("play")
  let timer = 0
  const stop = () => { clearInterval(timer); timer = 0; button.textContent = "Play" }
  const curve = plots.find(plot => !plot.svg.closest(".chart"))
  const steps = [...samples].map(sample => sample.dataset.step === "" ? NaN : +sample.dataset.step)
  const go = i => {
    slider.value = i
    show(samples, i)
    if (steps[i] >= 0) curve?.mark(steps[i])
  }
  if (curve) curve.svg.onclick = event => {
    const at = curve.stepAt(new DOMPoint(event.clientX, event.clientY).matrixTransform(curve.svg.getScreenCTM().inverse()).x)
    stop()
    go(steps.reduce((best, step, i) => Math.abs(step - at) < Math.abs(steps[best] - at) ? i : best, 0))
  }
  slider.max = samples.length - 1
  slider.oninput = () => { stop(); go(+slider.value) }
  button.onclick = () => {
    if (timer) return stop()
    button.textContent = "Pause"
    if (slider.value === slider.max) go(0)
    timer = setInterval(() => { go(+slider.value + 1); if (slider.value === slider.max) stop() }, 1200)
  }
  go(samples.length - 1)
}

if (byId("next")) {
  const words = byId("words").children, tables = byId("next").children
  const { temperatures, pieces, rows, prompts } = JSON.parse(byId("distributions").textContent)
  const [temperature, topK, topP] = ["temperature", "top-k", "top-p"].map(byId)
  const plain = [...tables].map(table => table.querySelector("ol").innerHTML)
  let at = 0
  topK.max = rows[0].pieces.length
  const item = (name, share, following) => {
    const made = document.createElement("li"), bar = document.createElement("i")
    bar.style.width = 100 * share + "%"
    for (const child of [name, bar, share >= .001 || !share ? (100 * share).toFixed(1) + " %" : "1 in " + Math.round(1 / share).toLocaleString("en")]) {
      const cell = made.appendChild(document.createElement("span"))
      cell.append(child)
    }
    made.firstChild.className = "token"
    made.classList.toggle("true", following)
    return made
  }
  const settings = () => [temperature.value / 10, +topK.value, topP.value / 100]
  const shape = () => {
    const [t, k, p] = settings(), row = rows[at], list = tables[at].querySelector("ol")
    temperature.nextElementSibling.value = t.toFixed(1)
    topK.nextElementSibling.value = k || "off"
    topP.nextElementSibling.value = p < 1 ? p.toFixed(2) : "off"
    byId("drawn").textContent = ""
    if (t === 1 && !k && p === 1) return list.innerHTML = plain[at]
    const { shares, others } = reshape(row, temperatures, t, k, p)
    const shown = shares.map((share, i) => [share, i]).filter(([share, i]) => share && (i < 10 || i === row.following))
    list.replaceChildren(...shown.map(([share, i]) => item(pieces[row.pieces[i]], share, i === row.following)))
    const more = others + shares.reduce((sum, share, i) => sum + (shown.some(([, j]) => j === i) ? 0 : share), 0)
    if (more > 5e-4) list.append(item("others", more, false))
  }
  const prompt = byId("prompt")
  byId("draw").onclick = () => {
    const row = rows[at], { shares } = reshape(row, temperatures, ...settings())
    let left = Math.random(), i = 0
    while (i < shares.length && (left -= shares[i]) >= 0) i++
    const follows = i === row.following && at + 1 < rows.length, token = `“${pieces[row.pieces[i]]}”`
    if (follows) choose(at + 1)
    byId("drawn").textContent = follows ? `${token}, as in the text` : (i < shares.length ? token : "one of the others")
      + ", after which the text continues differently: draw again"
  };
  [temperature, topK, topP].forEach(slider => { slider.oninput = shape })
  const choose = (i, typed = prompts[i]) => {
    at = i
    show(words, i)
    show(tables, i)
    shape()
    if (prompt.value !== typed) prompt.value = typed
    byId("unknown").hidden = promptOf(prompts, typed).known
  };
  prompt.oninput = () => choose(promptOf(prompts, prompt.value).at, prompt.value);
  [...words].forEach((word, i) => {
    word.onfocus = word.onclick = () => choose(i)
    word.onpointerenter = () => document.activeElement === prompt || choose(i)
  })
  choose(Math.floor(words.length / 2))
}

if (byId("attention")) {
  const { pieces, heads, layers, open } = JSON.parse(byId("attention").textContent), T = pieces.length, cell = 16, pad = 96
  const bytes = layers.map(layer => Uint8Array.from(atob(layer), c => c.charCodeAt(0)))
  const share = (layer, head, q, k) => bytes[layer][(head * T + q) * T + k] / 255
  const shade = x => Math.sqrt(x)  // so that small shares can be seen
  const grid = byId("heads"), map = byId("map"), text = byId("read")
  let layer = 0, head = 0, query = open[2]

  const element = (parent, name, attributes, content = "") => {
    const made = document.createElementNS(parent.namespaceURI, name)
    for (const key in attributes) made.setAttribute(key, attributes[key])
    made.textContent = content
    return parent.appendChild(made)
  }
  map.setAttribute("viewBox", `${-pad - 18} -4 ${T * cell + pad + 22} ${T * cell + pad + 26}`)
  map.style.maxWidth = `${1.15 * (T * cell + pad)}px`
  map.style.setProperty("--width", `${T * cell + pad + 22}px`)
  element(map, "path", { class: "floor", d: `M0 0${pieces.map((_, i) => `h${cell}v${cell}`).join("")}H0Z` })
  const cells = element(map, "g", { class: "cell" })
  for (let q = 0; q < T; q++) for (let k = 0; k <= q; k++)
    element(cells, "rect", { x: k * cell, y: q * cell, width: cell - .5, height: cell - .5 })
  const short = piece => piece.length > 12 ? piece.slice(0, 11) + "…" : piece
  const rows = pieces.map((piece, i) => element(map, "text", { x: -6, y: i * cell + 12, "text-anchor": "end" }, short(piece)))
  const columns = pieces.map((piece, i) => element(map, "text",
    { transform: `translate(${i * cell + 12} ${T * cell + 6}) rotate(-90)`, "text-anchor": "end" }, short(piece)))
  element(map, "text", { class: "axis", transform: `translate(${-pad - 4} ${T * cell / 2}) rotate(-90)`, "text-anchor": "middle" }, "the token that looks")
  element(map, "text", { class: "axis", x: T * cell / 2, y: T * cell + pad + 16, "text-anchor": "middle" }, "the token that it looks at")
  element(map, "text", { class: "mask", x: T * cell * .68, y: T * cell * .3, "text-anchor": "middle" }, "later tokens: masked")
  const row = element(map, "rect", { class: "band", height: cell }), column = element(map, "rect", { class: "band", width: cell })
  const tokens = pieces.map((piece, i) => element(text, "button", { class: "token", type: "button" }, piece))

  const read = (q, k) => {
    query = q
    const shares = pieces.map((_, i) => share(layer, head, q, i))
    k ??= shares.indexOf(Math.max(...shares))
    rows.forEach((label, i) => label.classList.toggle("lit", i === q))
    columns.forEach((label, i) => label.classList.toggle("lit", i === k))
    row.setAttribute("y", q * cell); row.setAttribute("width", (q + 1) * cell)
    column.setAttribute("x", k * cell); column.setAttribute("y", k * cell); column.setAttribute("height", (T - k) * cell)
    tokens.forEach((token, i) => {
      token.style.setProperty("--p", 100 * shade(shares[i]) + "%")
      token.classList.toggle("query", i === q); token.classList.toggle("on", i === k)
    })
    byId("reading").replaceChildren("token ", bold(`“${pieces[q]}”`), ` looks at token `, bold(`“${pieces[k]}”`), ` with ${percent(shares[k])}`,
      k === q ? " (itself)" : ` (${q - k} before)`)
  }
  const choose = (l, h) => {
    [layer, head] = [l, h]
    show(grid.querySelectorAll("button"), l * heads + h)
    byId("head-name").textContent = `Layer ${l}, head ${h}`
    let i = 0
    for (let q = 0; q < T; q++) for (let k = 0; k <= q; k++) cells.children[i++].setAttribute("opacity", shade(share(l, h, q, k)).toFixed(2))
    read(query)
  }
  const paint = () => grid.querySelectorAll("canvas").forEach((canvas, i) => {
    const context = canvas.getContext("2d"), [l, h] = [Math.floor(i / heads), i % heads]
    context.clearRect(0, 0, T, T)
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent")
    for (let q = 0; q < T; q++) for (let k = 0; k <= q; k++) { context.globalAlpha = shade(share(l, h, q, k)); context.fillRect(k, q, 1, 1) }
  })

  grid.style.gridTemplateColumns = `auto repeat(${heads}, minmax(1.2rem, 1fr))`
  element(grid, "span", {})
  for (let h = 0; h < heads; h++) element(grid, "span", {}, heads > 12 ? "" : h)
  layers.forEach((_, l) => {
    element(grid, "span", {}, l)
    for (let h = 0; h < heads; h++) {
      const button = element(grid, "button", { type: "button", "aria-label": `layer ${l}, head ${h}` })
      element(button, "canvas", { width: T, height: T })
      button.onclick = () => choose(l, h)
    }
  })
  map.onpointermove = map.onpointerdown = event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(map.getScreenCTM().inverse())
    const q = Math.floor(at.y / cell), k = Math.floor(at.x / cell)
    if (0 <= k && k <= q && q < T) read(q, k)
  }
  tokens.forEach((token, i) => { token.onpointerenter = token.onfocus = token.onclick = () => read(i) })
  matchMedia("(prefers-color-scheme: dark)").onchange = paint
  paint()
  choose(open[0], open[1])
}

// Every chart can be saved as an SVG with the colors of the page.
const style = document.querySelector("style").textContent
document.querySelectorAll("figure > svg, #map").forEach(svg => {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "save js", textContent: "Save SVG" })
  const title = svg.closest("figure")?.querySelector("h3")?.firstChild.textContent.trim() || svg.getAttribute("aria-label")
  button.onclick = () => {
    const copy = svg.cloneNode(true), [, , width, height] = svg.getAttribute("viewBox").split(" ")
    copy.setAttribute("width", width); copy.setAttribute("height", height)
    copy.insertAdjacentHTML("afterbegin", "<style></style>")
    copy.firstChild.textContent = style + "svg { background: var(--paper) }"
    const file = new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" })
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(file), download: title.replace(/\W+/g, "-") + ".svg" })
    link.click()
    URL.revokeObjectURL(link.href)
  }
  svg.before(button)
})
