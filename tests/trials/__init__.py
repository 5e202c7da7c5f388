"""What tests and benchmarks both need: trials of a checkpoint store, and what they are made of."""
