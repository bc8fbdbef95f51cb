"""The constants of the counter-based random generator SplitMix64 (Steele et al. 2014).

`data/windows.py` computes it in NumPy, `kernels/draws.py` in PyTorch, and `kernels/llvm/draws.py` in machine code.
"""

GOLDEN = 0x9E3779B97F4A7C15  # the increment: 2 ** 64 over the golden ratio, also the multiplier of hashes
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # multipliers of the output function
