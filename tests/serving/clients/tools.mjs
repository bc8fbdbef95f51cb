// The tools of a travel agent that answers in three steps, as in tools.py.
import { z } from "zod";

export const ASK = [{ role: "user", content: "Where shall I go?" }];
export const TOOLS = {
  cities: z.object({ country: z.string() }),
  weather: z.object({ city: z.string(), days: z.int() }),
  book: z.object({ city: z.string() }),
};
export const called = (name, given) =>
  `${name}: ${Object.keys(given).sort().map((key) => `${key}=${given[key]}`).join(", ")}`;
