"""Imported first by every benchmark that runs as a file, so that it measures its own checkout.

Puts the checkout's root before an installed bssearch in the path of this process and of the Python processes that it
starts.
"""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
