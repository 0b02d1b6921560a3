"""Imported first by every benchmark that is run as a file: it measures the code of its own checkout.

The root of the checkout comes first in the path of this process and of the Python processes that it starts, before a
bssearch that is installed.
"""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
