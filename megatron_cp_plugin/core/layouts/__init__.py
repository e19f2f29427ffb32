"""Layouts that follow documents, and whether tokens are those of a layout."""
