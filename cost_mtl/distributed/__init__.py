"""More than one process: which group, what is sent, and whether the processes agree."""
