"""The console script, and ``python -m forebay.cli``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and end the process. Ctrl-C prints one word from here on, even during the remaining imports."""
    try:
        from forebay.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
