import os

from hypothesis import Phase, settings

pytest_plugins = ["tests.servers.fixtures"]

# Machines are shared and slow at times: a deadline per example would be a timed test.
settings.register_profile("ckptsync", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=3000)
settings.register_profile("long", deadline=None, max_examples=1_000_000)
# A mutant is to be found, not to be made small.
settings.register_profile(
    "mutation", deadline=None, max_examples=25, derandomize=True, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("CKPTSYNC_HYPOTHESIS", "ckptsync"))
