"""`python -m tests.faults [PATTERN] [--repeat N]`: inject every fault, whole runs included, and print the table.

Ends with 1 where one came out otherwise than expected; one that this machine cannot have is named, not counted as such. Lines appear as faults end; the table comes last.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from tests.faults import all as suite
from tests.faults.table import NOT_RUN, inject, lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("pattern", nargs="?", default="", help="only faults with this in their name")
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # each injected failure would be a line
    suite.start()
    outcomes = []
    for _ in range(options.repeat):
        for fault in suite.FAULTS:
            if options.pattern in fault.name:
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    outcomes.append(inject(fault, Path(folder)))
                word = "ok" if outcomes[-1].is_ok else outcomes[-1].happened
                print(f"{fault.where}: {fault.what}: {word} ({outcomes[-1].seconds:.1f} s)", file=sys.stderr, flush=True)
    suite.close()
    print("\n".join(lines(outcomes)))
    return 0 if all(o.is_ok or o.happened.startswith(NOT_RUN) for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
