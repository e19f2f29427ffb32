"""What follows a plan: from rank to rank, by gathers, or by exchanges of heads."""
