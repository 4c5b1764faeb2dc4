"""A search over settings of a run: the space, which points are tried, what came of each, and the page over all."""
