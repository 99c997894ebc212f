"""``zero-optim bench``: the ops and the step, timed against their baselines and against the memory, anywhere."""
