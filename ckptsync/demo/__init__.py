"""`ckptsync demo`: the main job, end to end, on one machine and in real processes."""
