"""``zero-optim bench``: the ops and the step, timed against their baselines and against the memory, anywhere.

``request`` (the flags) ← ``run``, which takes one of these; ``benchmarks/`` has more, which it runs in the same way:

- an op, as a list of cases (``case``): ``adam_step``, ``pack``, ``grad_stats``; ``gpt_step`` is a step on one device.
  They are compared with ``fused_adams`` (of other packages) and ``masters`` (of the AMP recipe).
- a step on several ranks: ``train_step`` (with ``contenders``), ``step_overhead``.
- ``memory_walkthrough``; ``checkpoints``; ``offload`` (with ``offload_contenders`` and ``offload_links``).

They measure with ``timing``, ``ranks`` (fresh processes), ``contest`` (alone, then in turn), ``traffic``,
``live_memory``, ``peak_memory``.

What they find is a ``record``: the machine, and rows. ``rows/`` has a file for each kind of row. It says once which
``columns`` a row has, how they are written, and which ``drawings`` are made of them. From that come the ``table``, the
``plot`` and the page of ``report``.
"""
