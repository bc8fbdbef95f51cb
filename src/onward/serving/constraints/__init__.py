"""Constraints in processes of their own, each with a limit of time and of memory."""
