"""The console script, and ``python -m forebay.cli``."""

from __future__ import annotations

import contextlib
import os
import sys

from forebay import __version__


def main() -> None:
    """Run the command line and end the process. Ctrl-C prints one word from here on, even during the remaining imports."""
    if sys.argv[1:] == ["--version"] and "_FOREBAY_COMPLETE" not in os.environ and sys.stdout is not None:
        # A single word needs no parser, which takes a tenth of a second to import.
        with contextlib.suppress(OSError):  # below, the output fails again, and is reported
            print(f"forebay {__version__}", flush=True)
            return
    try:
        from forebay.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
