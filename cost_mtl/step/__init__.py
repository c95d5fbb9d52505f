"""The parts of one step of :class:`cost_mtl.COST`."""
