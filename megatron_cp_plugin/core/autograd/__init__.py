"""Attention and linear attention as autograd sees them, once and under checkpointing."""
