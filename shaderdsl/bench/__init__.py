"""The benchmark: what `shaderdsl bench` times, checks and compares."""
