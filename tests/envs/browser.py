"""A headless Chromium for the tests of the dashboard: found, or installed the way that this machine has.

`python tests/envs/browser.py` installs one; `executable()` finds it. Debian's package needs root; elsewhere
Playwright's own download is asked for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def executable() -> str | None:
    """One of the system's, else Playwright's own, else None."""
    for name in NAMES:
        if (found := shutil.which(name)) is not None:
            return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if os.path.exists(path) else None


def install() -> None:
    if shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "fonts-liberation"]
        if subprocess.run([*install, "chromium-headless-shell"], check=False).returncode == 0:
            return
    subprocess.run([sys.executable, "-m", "playwright", "install", "--only-shell", "chromium"], check=True)


if __name__ == "__main__":
    if executable() is None:
        install()
    print(executable())
