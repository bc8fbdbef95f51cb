// Vercel's AI SDK: a text, a stream, three steps with tools, and an object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ASK, TOOLS, called } from "./tools.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAICompatible({
  name: "onward",
  baseURL: process.argv[2],
  apiKey: "none",
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const model = provider("caller");
const common = { model, maxRetries: 0 };
const steps = [];
const tools = Object.fromEntries(
  Object.entries(TOOLS).map(([name, inputSchema]) => [
    name,
    tool({ description: name, inputSchema, execute: (given) => steps[steps.push(called(name, given)) - 1] }),
  ]),
);
const whole = await generateText({ ...common, prompt: "Hello", temperature: 0 });
const stream = streamText({ ...common, prompt: "Hello", temperature: 0 });
let streamed = "";
for await (const piece of stream.textStream) streamed += piece;
const agent = await generateText({ ...common, messages: ASK, tools, stopWhen: stepCountIs(6) });
const stepsWhole = steps.splice(0);
const live = streamText({ ...common, messages: ASK, tools, stopWhen: stepCountIs(6) });
await live.consumeStream();
const trip = await generateText({
  ...common,
  prompt: "Where?",
  output: Output.object({ schema: z.object({ city: z.enum(["Oslo", "Rome"]), days: z.literal([1, 2, 3]) }) }),
});
console.log(
  JSON.stringify({
    text: whole.text,
    usage: whole.usage.totalTokens,
    streamed,
    steps: stepsWhole,
    final: agent.text,
    "streamed steps": steps,
    "streamed final": await live.text,
    trip: trip.output,
  }),
);
