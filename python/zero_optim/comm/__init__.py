"""Which ranks talk, how, and in what memory: collectives, groups, buffers, what is on its way."""
