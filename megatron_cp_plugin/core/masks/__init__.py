"""Who sees whom: documents, spans and windows, down to the tiles of a kernel call."""
