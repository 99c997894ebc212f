"""``zero-optim bench``: the ops and the step, timed against their baselines and against the memory, anywhere.

``request`` (the flags) ← ``run``, which takes one of these:

- an op, as a list of cases (``case``): ``adam_step``, ``pack``, ``grad_stats``; ``gpt_step`` is a step on one device.
  They are compared with ``fused_adams`` (of other packages) and ``masters`` (of the AMP recipe).
- a step on several ranks: ``train_step``, ``stages`` (with ``contenders``), ``step_overhead``, ``scale`` (with
  ``scale_model`` and ``bucket_parts``), ``endurance`` (with ``census``).
- ``memory_walkthrough``; ``checkpoints``; ``offload`` (with ``offload_contenders``, ``offload_links`` and
  ``offload_pages``).

They measure with ``timing``, ``ranks`` (fresh processes), ``launches``, ``traffic``, ``live_memory``, ``peak_memory``.
What they find is a ``record``, shown as a ``table`` and as plots: ``panels`` ← ``bars``, ``samples`` ← ``lines``,
``roofline``, all of which draw with ``figure``.
"""
