"""Token mixers with a state: recurrences, and the short convolutions before them."""
