"""How a move is found in its coordinates."""
