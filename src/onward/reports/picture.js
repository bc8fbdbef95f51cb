// The values of a panel are shown where one points: of a cell, or of all curves at the nearest x.
const panels = JSON.parse(document.getElementById("data").textContent)
const value = number => number === null ? "none" : String(+number.toPrecision(3))
const cell = (panel, column, row) => {
  const number = panel.values[row]?.[column]
  if (number === undefined || number === null) return ""
  const names = { row: panel.rows[row] ?? row, column: panel.columns[column] ?? column, value: value(number), text: panel.texts?.[row][column] ?? "" }
  return (panel.reading ?? "{row}, {column}: {value}").replace(/\{(\w+)\}/g, (_, name) => names[name])
}
const curve = (panel, share) => {
  const [first, last] = [panel.x[0], panel.x.at(-1)], at = first + share * (last - first)
  const i = panel.x.reduce((best, x, j) => Math.abs(x - at) < Math.abs(panel.x[best] - at) ? j : best, 0)
  return `${panel.x_name} ${panel.x[i]}: ` + Object.entries(panel.series).map(([name, values]) => `${name} ${value(values[i])}`).join(" · ")
}
document.querySelectorAll(".panel").forEach((group, i) => {
  const area = group.querySelector(".hit"), panel = panels[i], reading = group.closest(".pictured").querySelector(".readout")
  if (!area) return
  area.onpointermove = area.onpointerdown = event => {
    const box = area.getBoundingClientRect()
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height]
    const text = panel.values ? cell(panel, Math.floor(x * panel.values[0].length), Math.floor(y * panel.values.length)) : curve(panel, x)
    if (text) reading.textContent = (panel.title ? panel.title + " · " : "") + text
  }
})
