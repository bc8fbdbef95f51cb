"""Constraints in processes of their own, each with limits on time and memory."""
