"""The optimizers that Onward implements itself; others are named as "module:Class"."""

MATRIX_OPTIMIZERS = "muon", "normuon"  # for matrices inside blocks, with AdamW for all other parameters
