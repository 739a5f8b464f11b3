"""Adapters from the engine contract (`ckptsync.engine`) to real engines. Each is imported only where it is
used."""
