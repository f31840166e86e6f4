"""`python -m titanlike` is the `titanlike` command."""

import sys

from titanlike.cli import main

if __name__ == "__main__":
    sys.exit(main())
