"""Predicts runs without running them: time, memory, bytes, pictures. Needs torch."""
