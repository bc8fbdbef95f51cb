// openai in JavaScript: an answer, a stream, three steps with tools, a parsed object, and the code of an error.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ASK, TOOLS, called } from "./tools.mjs";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "caller";
const hello = [{ role: "user", content: "Hello" }];
const whole = await client.chat.completions.create({ model, messages: hello, temperature: 0 });
let streamed = "";
for await (const piece of await client.chat.completions.create({ model, messages: hello, temperature: 0, stream: true })) {
  streamed += piece.choices[0]?.delta?.content ?? "";
}
const steps = [];
const tools = Object.entries(TOOLS).map(([name, parameters]) => ({
  type: "function",
  function: {
    name,
    description: name,
    parameters: z.toJSONSchema(parameters),
    parse: JSON.parse,
    function: (given) => steps[steps.push(called(name, given)) - 1],
  },
}));
const final = await client.chat.completions.runTools({ model, messages: [...ASK], tools }).finalContent();
const stepsWhole = steps.splice(0);
const finalStreamed = await client.chat.completions.runTools({ model, messages: [...ASK], tools, stream: true }).finalContent();
const Trip = z.object({ city: z.enum(["Oslo", "Rome"]), days: z.literal([1, 2, 3]) });
const parsed = await client.chat.completions.parse({
  model,
  messages: [{ role: "user", content: "Where?" }],
  response_format: zodResponseFormat(Trip, "trip"),
});
let code = "";
try {
  await client.chat.completions.create({ model, messages: [{ role: "user", content: "x".repeat(5000) }] });
} catch (error) {
  code = error.code;
}
console.log(
  JSON.stringify({
    text: whole.choices[0].message.content,
    streamed,
    steps: stepsWhole,
    final,
    "streamed steps": steps,
    "streamed final": finalStreamed,
    trip: parsed.choices[0].message.parsed,
    code,
  }),
);
