"""Kernels for decoding on a CPU, compiled when they are first used."""
