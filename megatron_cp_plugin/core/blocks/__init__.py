"""Rows of ranks' blocks: whose they are, which meet, which travel, and in which order."""
