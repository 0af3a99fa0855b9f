"""What factorlayer is measured with.

`python -m benches.run` measures, `python -m benches.report` writes the tables, `python -m benches.compare` marks
what got slower from one results file to another.

workloads.py says what is measured, floor.py and ceilings.py how fast it could be, subjects.py and peers.py
who runs it, timing.py how a time is taken, results.py what is kept. factorlayer never imports benches.
"""

import os

# Keeps the profiler's own log lines out of the progress bars. torch reads it when it is loaded: after this.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
