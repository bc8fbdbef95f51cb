// The bytes of a cache: 2 x layers x kv heads x (width x bytes of a number + bytes of a vector's scale) x tokens x rows.
kinds.cache = (body, { models, formats }) => {
  const powers = (from, to) => Array.from({ length: Math.log2(to / from) + 1 }, (_, i) => from * 2 ** i)
  const divisors = number => Array.from({ length: number }, (_, i) => i + 1).filter(one => number % one === 0)
  const size = bytes => {
    const i = Math.min(4, Math.floor(Math.log2(bytes) / 10))
    return `${(bytes / 1024 ** i).toLocaleString("en-US", { maximumSignificantDigits: 4 })}\u00a0${["B", "KiB", "MiB", "GiB", "TiB"][i]}`
  }
  const knobs = body.appendChild(node("div", { class: "controls" }))
  const start = menu(knobs, "start from", models.map(({ name }) => name), () => begin())
  const layers = slider(knobs, "layers", { min: 1, max: 128, value: 1 }, () => draw())
  const heads = slider(knobs, "heads", { min: 1, max: 128, value: 1 }, () => { kvHeads.restop(divisors(heads.value)); draw() })
  const kvHeads = slider(knobs, "kv heads", { stops: [1], value: 1 }, () => draw())
  const width = slider(knobs, "width of a head", { stops: [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256], value: 128 }, () => draw())
  const length = slider(knobs, "tokens in a row", { stops: powers(128, 2 ** 20), value: 4096, text: grouped }, () => draw())
  const rows = slider(knobs, "rows (batch)", { stops: powers(1, 1024), value: 1, text: grouped }, () => draw())
  const names = Object.keys(formats), dtype = menu(knobs, "dtype", names, () => draw())
  const summary = body.appendChild(node("p", { class: "summary", role: "status" }))
  const table = body.appendChild(node("table", { class: "bars" }))
  const begin = () => {
    const model = models[start.value]
    heads.value = model.heads
    kvHeads.restop(divisors(model.heads));
    [[layers, model.layers], [kvHeads, model.kv_heads], [width, model.width], [length, model.length]].forEach(([one, value]) => { one.value = value })
    draw()
  }
  const draw = () => {
    const [number, scale] = formats[names[dtype.value]], model = models[start.value]
    const token = kv => 2 * layers.value * kv * (width.value * number + scale)
    const all = kv => token(kv) * length.value * rows.value
    const vector = scale ? `(${width.value} + ${scale}) bytes` : `${width.value} · ${count(number, "byte")}`
    summary.replaceChildren(`2 · ${count(layers.value, "layer")} · ${count(kvHeads.value, "kv head")} · ${vector} = `,
      `${size(token(kvHeads.value))} per token. With ${count(length.value, "token")} in ${count(rows.value, "row")}, the cache takes `,
      node("b", {}, size(all(kvHeads.value))), ".")
    const bars = [["this cache", all(kvHeads.value)], [`with ${count(heads.value, "kv head")}`, all(heads.value)], ["with 1 kv head", all(1)],
      [`weights of ${model.name}`, model.weights]], top = Math.max(...bars.map(([, bytes]) => bytes))
    table.replaceChildren(node("tbody", {}, ...bars.map(([name, bytes]) => barRow({ name, share: bytes / top, texts: [size(bytes)] }))))
  }
  begin()
}
