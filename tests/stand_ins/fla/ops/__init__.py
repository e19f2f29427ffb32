"""Of attention."""
