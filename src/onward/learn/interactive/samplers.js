// The distribution of the next token under temperature, top-k, top-p and min-p.
const SHOWN = 12
kinds.samplers = (body, { temperatures, pieces, rows, texts }) => {
  const knobs = body.appendChild(node("div", { class: "controls" }))
  const text = menu(knobs, "Text", texts.map(one => one + " …"), () => draw())
  const off = (value, none) => value === none ? "off" : String(value)
  const all = rows[0].logprobs.length
  const temperature = slider(knobs, "temperature", { min: 0, max: 2, step: .05, value: 1, text: t => t.toFixed(2) }, () => draw())
  const topK = slider(knobs, "top-k", { min: 0, max: 50, value: 0, text: k => off(k, 0) }, () => draw())
  const topP = slider(knobs, "top-p", { min: .05, max: 1, step: .01, value: 1, text: p => off(p, 1) }, () => draw())
  const minP = slider(knobs, "min-p", { min: 0, max: .5, step: .01, value: 0, text: p => off(p, 0) }, () => draw())
  const summary = body.appendChild(node("p", { class: "summary", role: "status" }))
  const table = body.appendChild(node("table", { class: "bars" })), actions = body.appendChild(node("p", { class: "actions" }))
  const settings = () => [temperature.value, topK.value, topP.value, minP.value]
  const draw = (times = 0) => {
    const row = rows[text.value], before = reshape(row, temperatures, 1, 0, 1).shares
    const { shares } = reshape(row, temperatures, ...settings())
    const left = shares.filter(Boolean).length, kept = shares.reduce((sum, share, i) => sum + (share && before[i]), 0)
    const counts = shares.map(() => 0)
    for (let i = 0; i < times; i++) counts[pick(shares)]++
    const most = Math.max(...shares, ...before), rest = values => values.slice(SHOWN).reduce((a, b) => a + b, 0)
    const line = (name, share, drawn, bars) => barRow({
      name, cut: !share, ...bars, texts: [share ? percent(share) : "cut", ...times ? [share ? String(drawn) : ""] : []],
    })
    const names = row.pieces.slice(0, SHOWN).map((piece, i) =>
      line(pieces[piece], shares[i], counts[i], { share: shares[i] / most, before: before[i] / most }))
    table.replaceChildren(
      node("thead", {}, node("tr", {}, ...["token", "probability", "", ...times ? [`of ${times}`] : []].map((name, i) =>
        node("th", { scope: "col", ...i === 1 ? { colspan: 2 } : {} }, name)).filter((_, i) => i !== 2))),
      node("tbody", {}, ...names, line(`${grouped(all - SHOWN)} others`, rest(shares), rest(counts))))
    summary.textContent = `${count(left, "token")} of ${grouped(all)} can be drawn. `
      + `In the model's own distribution, ${left === 1 ? "it has" : "they have"} ${percent(kept)} of the probability.`
  }
  const pick = shares => {
    let left = Math.random(), i = 0
    while (i < shares.length - 1 && (left -= shares[i]) >= 0) i++
    return i
  }
  button(actions, "Draw 100 tokens", () => draw(100))
  button(actions, "Reset", () => {
    [[temperature, 1], [topK, 0], [topP, 1], [minP, 0]].forEach(([one, value]) => { one.value = value })
    draw()
  })
  draw()
}
