#!/usr/bin/env python
"""Turns text files into a dataset for Megatron: the command `megatron-cp prepare-data`."""

import sys

from megatron_cp_plugin.harness.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
