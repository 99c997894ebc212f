"""The main job: a byte-level GPT trained on real text, its optimizer sharded over the ranks that torchrun starts.

``model`` ← ``config`` (flags) ← ``data``, ``world`` (ranks, device, signals), ``session``, ``run_dir`` (what a run
leaves on disk), ``output`` (what it prints) ← ``setup`` (what the ranks agree on), ``report`` ← ``trainer`` (a step)
← ``account`` (what is kept of a run) ← ``loop`` (a run).
"""
