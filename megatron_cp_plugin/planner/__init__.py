"""What a layer, and a step, will take; and the choice that follows."""
