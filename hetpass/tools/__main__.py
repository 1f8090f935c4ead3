"""`python -m hetpass.tools`, where the console script is not installed."""

import sys

from hetpass.tools.main import main

sys.exit(main())
