// The pairs of a query and a key at a distance, and their score at all distances.
kinds.rotary = (body, { products, trained, bases, frequencies }) => {
  const most = 4 * trained, turn = 2 * Math.PI
  const knobs = body.appendChild(node("div", { class: "controls" }))
  const distance = slider(knobs, "distance", { min: 0, max: most, value: 1, text: n => count(n, "token") }, () => draw())
  const base = slider(knobs, "base", { stops: bases, value: 10000, text: grouped }, () => draw())
  const summary = body.appendChild(node("p", { class: "summary", role: "status" }))
  const dials = body.appendChild(node("div", { class: "dials" })), chart = body.appendChild(node("div"))
  const score = (f, d) => products.reduce((sum, [a, b], i) => sum + a * Math.cos(d * f[i]) - b * Math.sin(d * f[i]), 0)
  const dial = (frequency, i) => {
    const angle = distance.value * frequency, whole = turn / frequency, far = whole > trained
    const hand = [22 * Math.cos(angle), -22 * Math.sin(angle)].map(one => one.toFixed(2))
    const picture = drawn("svg", { viewBox: "-26 -26 52 52", "aria-hidden": "true" }, drawn("circle", { r: 24 }),
      drawn("path", { d: `M0 0L${hand[0]} ${hand[1]}` }), drawn("circle", { class: "dot", cx: hand[0], cy: hand[1], r: 3 }))
    return node("div", { class: far ? "dial far" : "dial" }, picture, node("b", {}, `${(angle * 360 / turn % 360).toFixed(1)}°`),
      node("span", {}, `turn: ${grouped(Math.ceil(whole))}`))
  }
  const draw = () => {
    const f = frequencies[bases.indexOf(base.value)], d = distance.value
    dials.replaceChildren(...f.map(dial))
    const slow = f.filter(one => turn / one > trained).length
    summary.replaceChildren(`The score at this distance is ${score(f, d).toFixed(3)}. `,
      `${count(slow, "pair")} of ${f.length} (dashed) ${slow === 1 ? "makes" : "make"} no full turn within the trained length of ${trained}, `
      + "so that longer texts bring new angles.")
    const all = Array.from({ length: most + 1 }, (_, i) => score(f, i))
    const top = products.reduce((sum, [a, b]) => sum + Math.hypot(a, b), 0)
    const low = Math.min(0, ...all)
    const at = axes(chart, { label: "The score by distance", x: [0, most], y: [low, top], xTicks: [0, 1, 2, 3, 4].map(i => i * trained),
      yTicks: [0, top], xName: "distance in tokens", yName: "score", yText: y => String(+y.toPrecision(3)) })
    at.line([[trained, low], [trained, top]], "mark")
    at.text(trained, top, "trained length")
    at.line(all.map((y, x) => [x, y]), "curve")
    at.dot(d, score(f, d))
  }
  resized(chart, draw)
}
