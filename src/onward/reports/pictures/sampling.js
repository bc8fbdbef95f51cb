// The distribution of the next token under temperature, top-k, top-p and min-p, in the order of process_logits.
// `logprobs` are those of the likeliest tokens, the largest first; `others[i]` is the log-sum-exp of the logprobs of all
// other tokens divided by `temperatures[i]`, null where there are none. Returns the probabilities of the likeliest
// tokens, and that of all others together, which are kept or removed as one.
const reshape = ({ logprobs, others }, temperatures, temperature, topK, topP, minP = 0) => {
  const sum = values => values.reduce((a, b) => a + b, 0)
  if (temperature === 0) return { shares: logprobs.map((_, i) => +(i === 0)), others: 0 }
  const top = logprobs[0] / temperature
  let shares = logprobs.map(value => Math.exp(value / temperature - top))
  let rest = others[temperatures.indexOf(temperature)] ?? null
  rest = rest === null ? 0 : Math.exp(rest - top)
  if (topK && topK <= logprobs.length) {
    shares = shares.map((share, i) => logprobs[i] < logprobs[topK - 1] ? 0 : share)
    rest = 0
  }
  let total = sum(shares) + rest
  if (topP < 1) {
    let before = 0
    const kept = shares.map(share => {
      const within = before < topP * total
      before += share
      return within ? share : 0
    })
    if (before >= topP * total) rest = 0
    shares = kept
    total = sum(shares) + rest
  }
  if (minP) {
    const least = minP * Math.max(...shares)
    shares = shares.map(share => share < least ? 0 : share)
    if (!shares.at(-1)) rest = 0
    total = sum(shares) + rest
  }
  return { shares: shares.map(share => share / total), others: rest / total }
}

// For a typed prompt: the index of its longest prefix in `prompts`, and whether the prompt is itself a prefix of the
// text. `prompts` are the prefixes of a text, each one token longer than the one before.
const promptOf = (prompts, typed) => ({
  at: prompts.reduce((best, prompt, i) => typed.startsWith(prompt) ? i : best, 0),
  known: prompts.at(-1).startsWith(typed),
})
