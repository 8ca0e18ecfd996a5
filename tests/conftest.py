"""What every test process needs before torch is imported: one thread, gloo on the loopback, and
signals that mean what they say.
"""

from __future__ import annotations

import os
import signal

# Ranks share two cores: more threads a rank only fight. Workers inherit both settings.
os.environ["OMP_NUM_THREADS"] = "1"
# Without an interface gloo resolves this machine's host name: seconds where DNS is out of reach.
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

# A shell without a terminal starts what it puts aside (`&`, nohup) with these ignored, and every
# command of a test would inherit that.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
