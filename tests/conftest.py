from hypothesis import settings

pytest_plugins = ["tests.servers.fixtures"]

# Machines are shared and slow at times: a deadline per example would be a timed test.
settings.register_profile("ckptsync", deadline=None)
settings.load_profile("ckptsync")
