"""Plans: what they are, how they follow from a placement, and whether they are right."""
