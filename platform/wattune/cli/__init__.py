"""The command line: one verb a function, each a thin skin over `wattune.api`.

Tables and progress are for people; `--json` prints one object on standard output and nothing else. Exit codes: 0 done,
1 failed, 2 wrong usage or input, 3 nothing feasible, 130 Ctrl-C (128 and the number of another signal). Where `--json`
was asked for, a failure is an object too: `{"error": {"what": ..., "kind": ..., "exit_code": ...}}`.
"""

from wattune.cli.shell import main
from wattune.cli.verbs import app

__all__ = ["app", "main"]
