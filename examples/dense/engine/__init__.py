"""The training loop, recipes, logs, tables and plots. Nothing in here knows about images: a data set comes in as a
:class:`dense.engine.problem.Problem`, and CelebA and QM9 use the same loop."""
