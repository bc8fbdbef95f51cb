"""Reads and writes GGUF, the file format of llama.cpp and related programs, without further libraries."""
