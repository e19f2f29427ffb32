"""What runs would take and be, told without them: time, memory, bytes, pictures. Needs torch."""
