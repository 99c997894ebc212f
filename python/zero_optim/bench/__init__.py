"""``zero-optim bench``: the ops and the step, timed against their baselines and against the speed of memory.

``request`` (the flags) ← ``run``, which runs these, and in the same way those that ``benchmarks/`` has:

- an op, as a list of cases (``case``): ``adam_step``, ``pack``, ``grad_stats``; and ``gpt_step`` of ``benchmarks/``,
  a step on one device. They are compared with ``fused_adams`` (of other packages) and ``masters`` (of the AMP recipe).
- a step on several ranks: ``train_step`` (with ``contenders``), ``step_overhead``.
- ``memory_walkthrough``; ``checkpoints``; ``offload`` (with ``offload_contenders`` and ``offload_links``).

They measure with ``timing``, ``ranks`` (fresh processes), ``contest`` (alone, then in turn), ``traffic``,
``live_memory``, ``peak_memory``.

The result is a ``record``: the machine, and rows. ``rows/`` has a file for each kind of row, with the ``columns`` of a
row, their form as text, and the ``drawings`` made of them. ``table``, ``plot`` and the page of ``report`` show these.
"""
