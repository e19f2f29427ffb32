"""What an attention layer, and a step of a model, takes on a machine. Needs torch alone."""
