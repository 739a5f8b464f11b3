"""A channel copied into another store, one way, as it grows: what brings versions to other clusters.

    Mirror("s3://here/run1", "/nfs/there/run1", retention=Retention(keep_last=5)).run()

The copy has the same channel id, epochs, nonces and digests, since every record is copied byte for byte, so watchers,
`resume` and `verify` cannot tell it from the original, and it may be mirrored on.
"""

from .mirror import Mirror, Mirrored

__all__ = ["Mirror", "Mirrored"]
