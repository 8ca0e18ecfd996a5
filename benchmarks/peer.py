"""Runs `peers/peer.py` by its short name: `python -m benchmarks.peer`."""

from benchmarks.peers.peer import main

if __name__ == "__main__":
    main()
