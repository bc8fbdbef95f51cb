"""Measurements of a model on this machine: its speed in generation and training, and the machine for which it is
planned."""
