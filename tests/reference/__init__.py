"""An independent single-process model and training loop, the reference for every layout.

Nothing here may import parallel3d: the reference is written from the formulas alone, in the
plainest torch, so that it cannot share a mistake of parallel3d.
"""
