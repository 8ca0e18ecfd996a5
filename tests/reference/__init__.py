"""An independent single-process model and training loop: what every layout is compared with.

Nothing here may import parallel3d: the reference is written from the formulas alone, in the
plainest torch there is, so that a mistake in parallel3d cannot be shared by its judge.
"""
