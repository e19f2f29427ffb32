"""A stand-in for flash-linear-attention, whose kernels need a GPU, with the signatures it has.

Megatron imports from it what gated delta net layers need. Written token by token, as in "Gated
Delta Networks" (arXiv 2412.06464, equation 10), not as Megatron's own path in torch, by chunks.
"""
