"""From files in MTAN's layout to batches: ``layout`` and ``check`` (what is there), ``dataset`` and ``augment`` (what
the model sees), ``synthetic`` and ``prepare_*`` (how the files come to be)."""
