"""How it is computed: partition into kernels, schedules, WGSL text. Needs no GPU."""
