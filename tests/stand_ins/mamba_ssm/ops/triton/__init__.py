"""Stands for `mamba_ssm.ops.triton`."""
