"""The command line: one verb a function, each a thin skin over `wattune.api`.

Tables and progress are for people; `--json` prints one object on standard output and nothing else. Exit codes: 0 done,
1 failed, 2 wrong usage or input, 3 nothing feasible. Ctrl-C ends `run` with 1, its study not being finished, and the
others with 130.
"""

from wattune.cli import author, machine, results, study
from wattune.cli.shell import app, main

__all__ = ["app", "author", "machine", "main", "results", "study"]
