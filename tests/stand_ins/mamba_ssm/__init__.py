"""Stands for mamba-ssm, which needs a GPU: the names that Megatron imports, in plain PyTorch."""

__version__ = "2.2.6"
