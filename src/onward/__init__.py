"""Onward: decoder-only Transformer language models from understanding to use."""
