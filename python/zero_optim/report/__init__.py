"""A run, or results of benchmarks, as one HTML page that needs no network.

``html`` (tags, escaped) ← ``charts`` (what ``drawing`` draws, as images) ← ``page`` (the frame, with ``style.css``)
← ``run_data`` ← ``run_charts``, ``run_tables`` ← ``run_page``; ``bench_page`` ← ``command``.
"""
