"""Layouts that follow documents."""
