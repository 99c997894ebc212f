"""``zero-optim bench``: the ops and the step on one device, timed in turns with their baselines.

``run`` reads the request and writes the results. ``cases`` (ops) and ``step`` (a training step) hold the contenders,
``timing`` the clocks, ``record`` the result file. The scripts in ``benchmarks/`` use the same clocks and the same file.
"""
