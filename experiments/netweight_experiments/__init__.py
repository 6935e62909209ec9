"""Paper tables, training of the toys that ship, and benchmarks: what shows and measures netweight."""
