"""A run, or results of benchmarks, as one HTML page that needs no network.

``html`` (tags, escaped) and ``figures`` (numbers as text) ← ``axis`` and ``thinning`` (of many steps to few points)
← ``line_chart``, ``bar_table`` ← ``page`` (the frame, ``style.css``, ``script.js``)
← ``run_data`` ← ``run_charts``, ``run_tables`` ← ``run_page``; ``bench_page`` ← ``command``.
"""
