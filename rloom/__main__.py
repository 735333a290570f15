"""`python -m rloom COMMAND`"""

import sys

from rloom.cli import main

sys.exit(main())
