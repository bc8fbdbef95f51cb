// Show the values of a panel at the pointer: the value of a cell, or the values of all curves at the nearest x.
const panels = JSON.parse(document.getElementById("data").textContent)
const value = number => number === null ? "none" : String(+number.toPrecision(3))
const size = panel => panel.size ?? [panel.values.length, panel.values[0].length]
// The values of a large panel are the pixels of the image that shades it.
const readImage = async (panel, group) => {
  const image = new Image(), canvas = document.createElement("canvas"), [rows, columns] = panel.size
  panel.values = []
  image.src = group.querySelector("mask image")?.getAttribute("href") ?? ""
  await image.decode()
  canvas.width = columns
  canvas.height = rows
  const context = canvas.getContext("2d")
  context.drawImage(image, 0, 0)
  const pixels = context.getImageData(0, 0, columns, rows).data
  const share = byte => (byte / 255 / panel.full) ** (panel.root ? 2 : 1)
  panel.values = Array.from({ length: rows }, (_, i) =>
    Array.from({ length: columns }, (_, j) => panel.top * share(pixels[4 * (i * columns + j)])))
}
const cell = (panel, column, row) => {
  const number = panel.values?.[row]?.[column]
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
    if (panel.size && !panel.values) readImage(panel, group)
    const box = area.getBoundingClientRect()
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height]
    const text = panel.series ? curve(panel, x) : cell(panel, Math.floor(x * size(panel)[1]), Math.floor(y * size(panel)[0]))
    if (text) reading.textContent = (panel.title ? panel.title + " · " : "") + text
  }
})
