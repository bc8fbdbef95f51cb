// The plane of N and D, and the loss along the line of equal operations through one point of it.
kinds.scaling = (body, { law: { E, A, B, alpha, beta }, models }) => {
  const N = [6, 13], D = [8, 14.5]  // powers of ten
  const loss = (n, d) => E + A / n ** alpha + B / d ** beta
  const g = (alpha * A / (beta * B)) ** (1 / (alpha + beta))
  const optimum = c => [g * (c / 6) ** (beta / (alpha + beta)), (c / 6) ** (alpha / (alpha + beta)) / g]
  const big = number => {
    const i = Math.min(5, Math.max(0, Math.floor(Math.log10(number) / 3 + 1e-9)))
    return `${+(number / 1000 ** i).toPrecision(3)}${["", " k", " M", " B", " T", "e15"][i]}`
  }
  const power = number => number.toExponential(2).replace("e+", "e")
  let place = models[0].slice(1)  // the exact point; the sliders round it to their steps
  const knobs = body.appendChild(node("div", { class: "controls" }))
  const start = menu(knobs, "start from", models.map(([name]) => name), () => begin())
  const n = slider(knobs, "parameters N", { min: N[0], max: N[1], step: .01, value: N[0], text: () => big(place[0]) }, () => draw([10 ** n.value, place[1]]))
  const d = slider(knobs, "tokens D", { min: D[0], max: D[1], step: .01, value: D[0], text: () => big(place[1]) }, () => draw([place[0], 10 ** d.value]))
  const actions = body.appendChild(node("p", { class: "actions" }))
  const jump = button(actions, "Move to the best N and D", () => move(...optimum(6 * place[0] * place[1])))
  const summary = body.appendChild(node("p", { class: "summary", role: "status" }))
  const table = body.appendChild(node("table", { class: "bars" }))
  const both = body.appendChild(node("div", { class: "pair" })), plane = both.appendChild(node("div")), along = both.appendChild(node("div"))
  const move = (...to) => {
    place = to;
    [n.value, d.value] = to.map(Math.log10)
    draw()
  }
  const begin = () => move(...models[start.value].slice(1))
  const inside = ([p, q]) => p >= N[0] && p <= N[1] && q >= D[0] && q <= D[1]
  const draw = (to = place) => {
    place = to
    const [x, y] = place, c = 6 * x * y, best = optimum(c), here = loss(x, y), least = loss(...best)
    const shown = inside(best.map(Math.log10))
    jump.disabled = !shown
    summary.replaceChildren(`C = 6 N D = ${power(c)} operations, ${big(y / x)} tokens per parameter. `,
      `The loss is ${here.toFixed(3)} nats per token; the best split of C, N = ${big(best[0])} and D = ${big(best[1])}, has ${least.toFixed(3)}${shown ? "" : " and is outside of the plots"}.`)
    const terms = [["E, entropy", E], ["A / N^α, size", A / x ** alpha], ["B / D^β, data", B / y ** beta]]
    table.replaceChildren(node("tbody", {}, ...terms.map(([name, value]) =>
      barRow({ name, share: value / Math.max(...terms.map(term => term[1])), texts: [value.toFixed(3)] }))))
    const range = ([from, to], steps = 400) => Array.from({ length: steps + 1 }, (_, i) => from + (to - from) * i / steps)
    const thousand = text => x => text(10 ** x)
    const at = axes(plane, { label: "Lines of equal loss in the plane of N and D", height: 260, x: N, y: D, xTicks: [6, 8, 10, 12], yTicks: [8, 10, 12, 14],
      xName: "parameters N", yName: "tokens D", xText: thousand(big), yText: thousand(big) })
    const other = (left, numerator, exponent) => left > 0 ? Math.log10(numerator / left) / exponent : Infinity
    const levels = [2, 2.2, 2.5, 3, 4, 6].map(level => [level, [
      ...range(N).map(p => [p, other(level - E - A / 10 ** (alpha * p), B, beta)]),
      ...range(D).map(q => [other(level - E - B / 10 ** (beta * q), A, alpha), q]),  // up to the edges where a curve is steep
    ].filter(inside).sort((one, next) => one[0] - next[0])]).filter(([, points]) => points.length)
    for (const [, points] of levels) at.line(points, "level")
    const diagonal = range(N).map(p => [p, Math.log10(c / 6) - p]).filter(inside)
    at.line(diagonal, "curve")
    for (const [level, points] of levels) at.text(...points[points.length - 1], level.toFixed(2), "end")
    if (shown) at.ring(...best.map(Math.log10))
    at.dot(Math.log10(x), Math.log10(y))
    const losses = diagonal.map(([p, q]) => [p, loss(10 ** p, 10 ** q)])
    const top = Math.max(here, Math.min(least + 1, Math.max(...losses.map(([, value]) => value)))) + .05
    const on = axes(along, { label: "The loss along the line of equal operations", height: 260, x: N, y: [E - .1, top], xTicks: [6, 8, 10, 12],
      yTicks: top - least > .1 * (top - E) ? [least, top] : [least], xName: "parameters N at this C", yName: "loss", xText: thousand(big), yText: value => value.toFixed(2) })
    on.line(N.map(p => [p, E]), "mark")
    on.text(N[0], E, `E = ${E.toFixed(2)}`)
    on.line(losses.filter(([, value]) => value <= top), "curve")
    if (shown) on.ring(Math.log10(best[0]), least)
    on.dot(Math.log10(x), here)
  }
  begin()
  resized(plane, () => draw())
}
