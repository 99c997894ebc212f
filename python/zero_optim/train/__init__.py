"""The main job: a byte-level GPT trained on real text, its optimizer sharded over the ranks that torchrun starts.

``model`` (and flags) ← ``ranks`` (starting, joining and stopping them), ``page`` (``report.html``
and the tables) ← ``run_dir`` (what a run leaves on disk) ← ``loop`` (the text, a step, and a run from start to end).
"""
