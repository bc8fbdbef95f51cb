// A mask, selected by packing and by window or chunk, and the tokens that layers with this mask reach.
kinds.masks = (body, { length, kinds: names, masks }) => {
  const knobs = body.appendChild(node("div", { class: "controls" }))
  const documents = slider(knobs, "packed documents", { min: 1, max: masks.length, value: 1 }, () => draw())
  const kind = menu(knobs, "a token sees", names, () => draw())
  const size = slider(knobs, "size", { min: 1, max: length, value: 3, text: n => count(n, "token") }, () => draw())
  const layers = slider(knobs, "layers", { min: 1, max: 6, value: 1 }, () => draw())
  const query = slider(knobs, "token that looks", { min: 0, max: length - 1, value: length - 1 }, () => draw())
  const summary = body.appendChild(node("p", { class: "summary", role: "status" }))
  const grid = body.appendChild(node("div", { class: "grid", "aria-hidden": "true" }))  // the summary describes one row of the mask
  grid.style.gridTemplateColumns = `repeat(${length + 1}, minmax(0, 1fr))`
  const draw = () => {
    size.input.disabled = kind.value === 0
    const seen = masks[documents.value - 1][kind.value][kind.value ? size.value - 1 : 0].map(row => [...row].map(Number))
    let reached = seen
    for (let i = 1; i < layers.value; i++)
      reached = reached.map(row => seen.map((_, k) => +row.some((one, j) => one && seen[j][k])))
    const cells = seen.flatMap((row, q) => {
      const label = node("span", { class: "label" }, q)
      return [label, ...row.map((one, k) => {
        const made = node("i", { class: [one ? "seen" : reached[q][k] ? "reached" : "", q === query.value ? "row" : ""].join(" ") })
        made.onclick = () => { query.value = q; draw() }
        return made
      })]
    })
    grid.replaceChildren(...cells, node("span"), ...seen.map((_, k) => node("span", { class: "label column" }, k)))
    const pairs = seen.flat().filter(Boolean).length, q = query.value
    const list = row => row.flatMap((one, k) => one ? [k] : []).join(", ")
    summary.replaceChildren(`The mask allows ${pairs} of ${length * length} pairs. Token ${q} sees ${list(seen[q])}`,
      layers.value > 1 ? ` and reaches ${list(reached[q])} through ${layers.value} layers.` : ".")
  }
  draw()
}
