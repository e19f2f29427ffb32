"""Linear attention: its algorithms, kernels and states."""
