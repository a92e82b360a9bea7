"""`wattune` and `python -m wattune`."""

from wattune.cli import main

if __name__ == "__main__":
    main()
