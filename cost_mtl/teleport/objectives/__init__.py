"""What a teleport improves."""
