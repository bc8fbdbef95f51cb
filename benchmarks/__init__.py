"""Side by side with peers and plain baselines: each module is a command that prints a table of ratios."""
