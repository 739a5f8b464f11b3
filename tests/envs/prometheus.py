"""A Prometheus with its promtool, for the test of the Grafana dashboard: found, or unpacked from Debian's package.

`python tests/envs/prometheus.py` gets one. The package is not installed, since that would start a service for the
whole machine, and needs root.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import tempfile

if __package__:
    from .make import cache_dir
else:
    from make import cache_dir


def executable(name: str = "prometheus") -> str | None:
    """The system's, else the one that was unpacked, else None."""
    unpacked = os.path.join(_folder(), "usr", "bin", name)
    return shutil.which(name) or (unpacked if os.access(unpacked, os.X_OK) else None)


def install() -> None:
    """Raises CalledProcessError, or FileNotFoundError where there is no apt."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() == 0:
            subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=folder, check=True, stdout=sys.stderr)
        (package,) = glob.glob(os.path.join(folder, "prometheus_*.deb"))
        shutil.rmtree(_folder(), ignore_errors=True)
        subprocess.run(["dpkg-deb", "-x", package, _folder()], check=True)


def _folder() -> str:
    return os.path.join(cache_dir(), "envs", "prometheus")


if __name__ == "__main__":
    try:
        if executable() is None:
            install()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"no Prometheus: its test will be skipped ({error})", file=sys.stderr)
    print(executable())
