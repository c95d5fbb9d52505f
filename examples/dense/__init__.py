"""NYUv2 and CityScapes: data, models, losses, metrics and the training loop behind the scripts beside this folder.

Read in this order: ``spec.py`` (what a data set is), ``data/`` (files to tensors), ``models/``, ``losses.py``,
``metrics.py``, then ``engine/`` (the loop, the recipes, the tables; nothing in it knows about images).
"""
