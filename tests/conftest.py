"""What every test process needs before torch is imported: one thread, and gloo on the loopback."""

from __future__ import annotations

import os

# Ranks share two cores: more threads a rank only fight. Workers inherit both settings.
os.environ["OMP_NUM_THREADS"] = "1"
# Without an interface gloo resolves this machine's host name: seconds where DNS is out of reach.
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
