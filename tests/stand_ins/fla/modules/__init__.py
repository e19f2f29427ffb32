"""Of layers."""
