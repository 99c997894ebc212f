"""The main job: a byte-level GPT trained on real text, its optimizer sharded over the ranks that torchrun starts.

``model`` ← ``config`` (flags) ← ``data``, ``world`` (ranks, device, signals), ``page`` (``report.html`` and the tables)
← ``run_dir`` (what a run leaves on disk, and what the ranks agree on) ← ``trainer`` (a step) ← ``loop`` (a run).
"""
