"""Whether exports and databases that were changed at random are ever half taken in, or make a traceback.

Run as ``python tests/benchmarks/fuzzed_transfers.py [--cases 10000]``: some fifteen minutes of CPU on one core. A
study with trials in every state is exported; of the file bytes are flipped, cut and put in, before and after the
compression, lines dropped, doubled and swapped, values replaced, with the digest as it was or made right again; or a
value of another database is changed behind bssearch's back. The case is then imported into a database that
is empty or has an earlier state of the study.

Bar: nothing but an error of bssearch comes of one, and after it the database's rows are as they were; what is taken in
is as bssearch stores it, and taken in again it changes nothing; none takes more than 5 s of CPU time. Exits 1 where it
is missed.
"""

if not __package__:
    __import__("from_clone")

import resource
import tempfile
import time
from pathlib import Path

from tests.benchmarks.harness import script, verdict
from tests.hostile_transfers import Transfers

LONGEST_S = 5.0
FIRST = 1_000_000
"""The cases are apart from those of the tests."""


def main(cases: int = 10_000) -> bool:
    """Try the cases, print what came of them, and judge."""
    failed, longest = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        transfers = Transfers(Path(folder))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for case in range(FIRST, FIRST + cases):
            began = time.process_time()
            wrong = transfers.fails(case)
            longest = max(longest, time.process_time() - began)
            if wrong is not None:
                failed.append(f"case {case}: {wrong}"[:300])
                print(failed[-1], flush=True)
        transfers.close()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    for name, count in sorted(transfers.outcomes.items()):
        print(f"{name:<20} {count:>6,}")
    print(f"{cases:,} cases, {len(failed)} failed; the longest took {longest:.2f} s; grown by {grown:.0f} MB")
    return verdict(not failed and longest <= LONGEST_S)


if __name__ == "__main__":
    script(main, __doc__)
