"""How models write tool calls and reasoning: one file per form, each with a reader and a grammar."""
