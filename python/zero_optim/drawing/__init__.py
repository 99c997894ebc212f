"""Drawings, and figures as text, for whoever shows them: plans, training, benchmarks, pages.

``figures`` (numbers as text); ``sheet`` (what is drawn, declared) ← ``plot``, which draws it as a PNG or
an SVG. Only ``plot`` needs matplotlib, so it is imported where something is drawn, and nowhere before.
"""
