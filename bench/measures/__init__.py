"""What the benchmarks measure: the machine's limits, ours, and torch's own checkpointing."""
