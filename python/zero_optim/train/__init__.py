"""The main job: a byte-level GPT trained on real text, its optimizer sharded over the ranks that torchrun starts.

``config`` (flags) ← ``data, model`` ← ``world`` (ranks, device, signals) ← ``run_dir`` (what a run leaves on disk) ← ``report`` ← ``loop``.
"""
