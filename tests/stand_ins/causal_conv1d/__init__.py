"""Stands for causal-conv1d, whose version Megatron asks for where documents are packed."""

__version__ = "1.5.0"
