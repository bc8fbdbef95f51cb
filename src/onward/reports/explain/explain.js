// Shows one step of the story at a time.
const steps = [...document.getElementById("steps").children], place = document.getElementById("place")
const go = i => {
  place.value = i
  steps.forEach((step, j) => step.classList.toggle("on", j === place.value - 1))
  document.getElementById("count").textContent = `${place.value} of ${steps.length}`
}
place.max = steps.length
place.oninput = () => go(+place.value)
document.getElementById("back").onclick = () => go(+place.value - 1)
document.getElementById("on").onclick = () => go(+place.value + 1)
document.onkeydown = event => {
  if (event.target !== place && event.key === "ArrowRight") go(+place.value + 1)
  if (event.target !== place && event.key === "ArrowLeft") go(+place.value - 1)
}
go(1)
