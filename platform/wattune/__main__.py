"""`wattune` and `python -m wattune`."""

import sys

_INTERRUPTED = 130
"""A shell's code for what SIGINT ended."""


def main() -> None:
    """Runs the command line."""
    try:
        from wattune.cli import main as run_command  # takes a moment, in which a Ctrl-C may come
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    run_command()


if __name__ == "__main__":
    main()
