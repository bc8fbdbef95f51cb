"""Comparisons with other libraries and plain baselines: each module is a command that prints a table of ratios."""
