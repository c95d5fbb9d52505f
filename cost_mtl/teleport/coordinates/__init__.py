"""Coordinates of a move: the parameters themselves, an adapter, differences of earlier values."""
