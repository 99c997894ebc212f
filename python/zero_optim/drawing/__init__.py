"""Drawings, and figures as text, which plans, training, benchmarks and pages show.

``figures`` (numbers as text); ``sheet`` (what is drawn, declared) ← ``plot``, which draws it as a PNG or
an SVG. Only ``plot`` needs matplotlib, so it is imported where something is drawn, and nowhere before.
"""
