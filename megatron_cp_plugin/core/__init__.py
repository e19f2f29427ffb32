"""Layouts, tiles, merging, communication: what every algorithm is made of. Needs torch alone."""
