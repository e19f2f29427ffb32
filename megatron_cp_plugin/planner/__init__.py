"""Predicts the time of an attention layer, or of a training step, on a machine. Needs torch."""
