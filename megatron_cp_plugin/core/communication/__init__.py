"""Process groups, peer memory and ranks that are threads; what ranks agree on before a call."""
