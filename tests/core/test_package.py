import subprocess
import sys

import ckptsync

CORE = (
    "import ckptsync.channel, ckptsync.verify, watchers.watcher, watchers.stage, "
    "watchers.engines.vllm, watchers.engines.sglang, watchers.engines.vllm_transfer, watchers.engines.sglang_transfer"
)


def test_the_public_names_are_these():
    own = [name for name in ckptsync.__all__ if name not in ckptsync.errors.__all__]
    assert own == [
        "Channel",
        "DeltaPolicy",
        "Engine",
        "Manifest",
        "Mirror",
        "Published",
        "Publisher",
        "PublisherConfig",
        "ResumePoint",
        "Retention",
        "Synced",
        "VersionId",
        "WeightSync",
        "open_store",
        "publish_base",
        "resume",
    ]
    for _ in range(2):  # a module of the same name would take the place of a function after the first look
        assert all(callable(getattr(ckptsync, name)) for name in ckptsync.__all__)


def test_every_error_can_be_caught_by_its_name_in_the_package():
    assert ckptsync.__all__[-len(ckptsync.errors.__all__) :] == ckptsync.errors.__all__
    assert ckptsync.Fenced is ckptsync.errors.Fenced


def test_the_core_runs_where_torch_and_the_engines_are_not_installed():
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'vllm', 'sglang', 'numpy']))"
    subprocess.run([sys.executable, "-c", f"{blocked}; {CORE}; import ckptsync.cli.ls, ckptsync.cli.watch"], check=True)


def test_reading_a_channel_on_disk_imports_no_object_store_client():
    loaded = "; import sys; print([m for m in ('s3fs', 'aiobotocore', 'torch', 'watchdog') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", CORE + loaded], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
