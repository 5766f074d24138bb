"""`python -m penstock`: the command, where its script is not on the path."""
from __future__ import annotations

import sys

from penstock.cli.main import main

sys.exit(main())
