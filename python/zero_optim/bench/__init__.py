"""``zero-optim bench``: the ops and the step on one device, timed in turns with their baselines."""
