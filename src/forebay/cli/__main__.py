"""The console script, and ``python -m forebay.cli``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, and end the process. Ctrl-C is answered in a word from here on, also while the rest is being imported."""
    try:
        from forebay.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
