import subprocess
import sys

import ckptsync

CORE = (
    "import ckptsync.channel, ckptsync.verify, watchers.watcher, watchers.stage, "
    "watchers.engines.vllm, watchers.engines.sglang"
)


def test_the_public_names_are_these():
    assert ckptsync.__all__ == [
        "Channel",
        "CkptSyncError",
        "Engine",
        "Manifest",
        "Published",
        "Publisher",
        "PublisherConfig",
        "ResumePoint",
        "VersionId",
        "open_store",
        "publish_base",
        "resume",
    ]
    for _ in range(2):  # a module of the same name would take the place of a function after the first look
        assert all(callable(getattr(ckptsync, name)) for name in ckptsync.__all__)


def test_the_core_runs_where_torch_and_the_engines_are_not_installed():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'vllm', 'sglang', 'numpy']))"
    subprocess.run([sys.executable, "-c", f"{blocked}; {CORE}; import ckptsync.cli.ls, ckptsync.cli.watch"], check=True)


def test_reading_a_channel_on_disk_imports_no_object_store_client():
    loaded = "; import sys; print([m for m in ('s3fs', 'aiobotocore', 'torch', 'watchdog') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", CORE + loaded], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
