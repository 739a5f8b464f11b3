"""The engine side: finds, stages, verifies and loads versions. ckptsync never imports it at import time."""
