"""Kernels of linear attention by chunks, as in fla-core 0.6."""
