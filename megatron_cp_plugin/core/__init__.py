"""Layouts, masks, plans, merging and communication, shared by all algorithms. Needs only torch."""
