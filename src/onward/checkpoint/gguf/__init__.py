"""GGUF, the format of llama.cpp and the programs around it: read and written without further libraries."""
