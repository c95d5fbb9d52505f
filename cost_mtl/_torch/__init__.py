"""Adaptations to torch: what has nothing to do with several tasks."""
