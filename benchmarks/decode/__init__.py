"""Generation side by side: Onward, transformers and llama.cpp. See `python -m benchmarks.decode --help`."""
