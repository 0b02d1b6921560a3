"""Median seconds to the target of each batch size, by the rows of ``bssearch trial list --format json``.

A run that missed the target took longer than any; if half of the runs missed, the median is unknown.
"""

import json
import math
import statistics
import sys

seconds: dict[int, list[float | None]] = {}
for row in json.load(sys.stdin):
    if row["answer"]["counts"]:
        seconds.setdefault(row["batch_size"], []).append(row["answer"]["seconds"])

medians: dict[int, float | None] = {}
for batch_size, values in sorted(seconds.items()):
    median = statistics.median(math.inf if value is None else value for value in values)
    medians[batch_size] = median if math.isfinite(median) else None

print(json.dumps(medians))
