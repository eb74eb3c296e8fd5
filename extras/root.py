"""`import root`: the first line of a script in this folder. The project's root takes the folder's
place on sys.path.

`python extras/NAME.py` searches imports in extras/, where neither the core nor `extras` itself is
found, and where `world` would be another package.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if sys.path and Path(sys.path[0]).resolve() == HERE:
    sys.path[0] = str(HERE.parent)
