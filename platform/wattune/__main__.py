"""`wattune` and `python -m wattune`."""

import gc
import sys

_INTERRUPTED = 130
"""A shell's code for what SIGINT ended."""


def main() -> None:
    """Runs the command line."""
    # What a program loads stays to its end: looking through it for garbage, while it grows and when it ends, costs each
    # command processor time and finds nothing.
    gc.disable()
    try:
        from wattune.cli import main as run_command  # takes half a second or more, in which a Ctrl-C may come
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    finally:
        gc.freeze()
        gc.enable()
    run_command()


if __name__ == "__main__":
    main()
