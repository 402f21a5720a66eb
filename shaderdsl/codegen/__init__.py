"""From stage graphs to kernels; text only, no GPU."""
