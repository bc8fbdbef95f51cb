// The steps of one token, each with a title, a shape, possibly a formula, a text, and panels of numbers.
kinds.stepper = (body, { steps }) => {
  const shown = value => value === null ? "" : value.toFixed(2).replace(/^-(0\.00)$/, "$1")
  const matrix = ({ title, rows, columns, values, texts }) => {
    const top = Math.max(...values.flat().map(Math.abs)) || 1
    const cell = (value, text) => {
      const made = node("td", { class: value < 0 ? "cell less" : "cell" }, text)
      made.style.setProperty("--share", Math.abs(value) / top)
      return made
    }
    const named = rows.length > 0
    const head = node("tr", {}, ...named ? [node("td")] : [], ...columns.map(name => node("th", { scope: "col" }, name)))
    return node("table", { class: "matrix" }, node("caption", {}, title), node("thead", {}, head), node("tbody", {},
      ...values.map((line, i) => node("tr", {}, ...named ? [node("th", { scope: "row" }, rows[i])] : [],
        ...line.map((value, j) => cell(value, texts ? texts[i][j] : shown(value)))))))
  }
  const chart = ({ title, bars, unit }) => {
    const top = Math.max(...Object.values(bars).map(Math.abs)) || 1
    const text = value => unit === "%" ? percent(value) : shown(value)
    return node("table", { class: "bars" }, node("caption", {}, title), node("tbody", {}, ...Object.entries(bars).map(([name, value]) =>
      barRow({ name, share: Math.abs(value) / top, less: value < 0, texts: [text(value)] }))))
  }
  const actions = body.appendChild(node("div", { class: "actions" }))
  const back = button(actions, "Back", () => go(place.value - 1)), next = button(actions, "Next", () => go(place.value + 1))
  const knobs = body.appendChild(node("div", { class: "controls" }))
  const place = slider(knobs, "step", { min: 1, max: steps.length, value: 1, text: i => `${i} of ${steps.length}` }, () => go(place.value))
  const step = body.appendChild(node("div", { class: "step", "aria-live": "polite" }))
  const go = i => {
    const { title, shape, formula, text, panels } = steps[i - 1]
    place.value = i
    back.disabled = i === 1
    next.disabled = i === steps.length
    step.replaceChildren(
      node("p", { class: "name" }, node("strong", {}, title), " ", node("code", {}, shape)),
      ...formula ? [node("p", {}, node("code", { class: "formula" }, formula))] : [], node("p", {}, text),
      ...panels.map(panel => node("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": panel.title || title },
        panel.bars ? chart(panel) : matrix(panel))))
  }
  go(1)
}
