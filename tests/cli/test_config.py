"""What is in force: the call, then the environment, then ckptsync.toml."""

from __future__ import annotations

import os

import pytest
import torch

import ckptsync as package
from ckptsync.errors import InvalidInput
from ckptsync.settings import Settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A working folder of its own, and an environment without our variables."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CKPTSYNC_")]:
        monkeypatch.delenv(name)


def write(text: str, path: str = "ckptsync.toml") -> str:
    with open(path, "w") as file:
        file.write(text)
    return path


def found(ckptsync, command: str) -> dict[str, tuple[object, str]]:
    """Key -> value and origin, as `ckptsync config` says it of a command."""
    rows = ckptsync("config", command, "--json").json["settings"]
    return {row["key"]: (row["value"], row["from"]) for row in rows}


def test_the_call_goes_before_the_environment_and_that_before_the_file(ckptsync, hf_folder, tmp_path, monkeypatch):
    for number, root in enumerate(["by-file", "by-variable", "by-call"]):
        assert ckptsync("publish", root, "--from", hf_folder(number)).code == 0
    write(f'root = "{tmp_path}/by-file"')
    assert "by-file" in ckptsync("ls", "--json").json["root"]
    monkeypatch.setenv("CKPTSYNC_ROOT", f"{tmp_path}/by-variable")
    assert "by-variable" in ckptsync("ls", "--json").json["root"]
    assert "by-call" in ckptsync("ls", f"{tmp_path}/by-call", "--json").json["root"]


def test_a_table_counts_for_its_command_and_before_what_is_outside_of_tables(ckptsync, monkeypatch):
    write('stage = "/shared"\n[watch]\nstage = "/mine"\nurl = ["http://a:1", "http://b:2"]\npoll = 0.5\n')
    assert found(ckptsync, "watch")["stage"] == ("/mine", "ckptsync.toml [watch]")
    assert found(ckptsync, "load")["stage"] == ("/shared", "ckptsync.toml")
    assert found(ckptsync, "watch")["follow"] == ("latest", "default")
    monkeypatch.setenv("CKPTSYNC_STAGE", "/theirs")
    assert found(ckptsync, "watch")["stage"] == ("/theirs", "CKPTSYNC_STAGE")


def test_several_engines_come_from_one_variable(ckptsync, monkeypatch, root):
    os.mkdir(root)
    monkeypatch.setenv("CKPTSYNC_URL", "http://127.0.0.1:9 http://127.0.0.1:8")
    ran = ckptsync("watch", root, "--engine", "module", "--quorum", "3")
    assert (ran.code, "can never be reached by 2 engines" in ran.err) == (2, True)


def test_the_file_is_named_by_the_call_or_by_a_variable(ckptsync, monkeypatch):
    write("[gc]\nkeep_last = 5\n", "one.toml")
    write("[gc]\nkeep_last = 6\n", "two.toml")
    monkeypatch.setenv("CKPTSYNC_CONFIG", "one.toml")
    assert found(ckptsync, "gc")["keep_last"] == (5, "one.toml [gc]")
    listed = ckptsync("--config", "two.toml", "config", "--json").json
    assert (listed["file"], listed["settings"][0]["value"]) == ("two.toml", 6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gc]\nkeep_lats = 3", "'keep_lats' in [gc] is not known: 'keep_last' is the nearest"),
        ("[wach]\npoll = 3", "table 'wach' is not known: 'watch' is the nearest"),
        ("rot = 3", "'rot' is not known: 'root' is the nearest"),
        ("[publisher]\nmax_lags = 3", "'max_lag' is the nearest"),
        ("[gc]\ndry_run = true", "'dry_run' in [gc] belongs to the call: ckptsync gc --dry-run"),
        ("[mirror]\n--follow = true", "'--follow' in [mirror] belongs to the call: ckptsync mirror --follow"),
        ("[gc]\nkeep-last = 3", "'keep-last' in [gc] is not known: 'keep_last' is the nearest"),
        ("[publisher]\nkeep_last = 3", "'keep_last' in [publisher] belongs into [publisher.retention]"),
        ("[publisher]\nremap = 3", "'remap' in [publisher] is for the code that makes the Publisher"),
        ("[watch]\nzzzz = 3", "'zzzz' in [watch] is not known: `ckptsync config watch` lists what is"),
        ("zzzz = 3", "'zzzz' is not known: `ckptsync config COMMAND` lists what is"),
        ("gc = 3", "'gc' must be a table"),
        ("[gc", "cannot be read"),
    ],
)
def test_what_no_command_knows_is_refused_by_every_command(ckptsync, root, text, words):
    write(text)
    os.mkdir(root)
    ran = ckptsync("ls", root)
    assert ran.code == 2
    assert words in ran.err


def test_a_file_that_was_named_and_is_not_there_is_refused(ckptsync, root):
    ran = ckptsync("--config", "nope.toml", "ls", root)
    assert (ran.code, "nope.toml cannot be read: No such file" in ran.err) == (2, True)


def test_a_misspelt_variable_is_refused_and_one_of_kubernetes_is_not(ckptsync, monkeypatch, root):
    os.mkdir(root)
    for name in ("CKPTSYNC_SERVICE_HOST", "CKPTSYNC_PORT", "CKPTSYNC_PORT_8080_TCP", "CKPTSYNC_ENGINE_SERVICE_PORT"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:8080")
    assert ckptsync("ls", root).code == 0
    monkeypatch.setenv("CKPTSYNC_KEEP_LATS", "3")
    ran = ckptsync("ls", root)
    assert (ran.code, "CKPTSYNC_KEEP_LAST is the nearest" in ran.err) == (2, True)


def test_a_value_that_is_none_is_refused_with_the_place_that_it_is_from(ckptsync, monkeypatch, root):
    monkeypatch.setenv("CKPTSYNC_KEEP_LAST", "many")
    ran = ckptsync("gc", root)
    assert ran.code == 2
    assert "keep_last = 'many' of CKPTSYNC_KEEP_LAST: " in ran.err


def test_config_shows_no_secret_and_says_when_nothing_is_set(ckptsync, monkeypatch):
    assert "nothing is set" in ckptsync("config").out
    monkeypatch.setenv("CKPTSYNC_SIDECAR_TOKEN", "hunter2")
    monkeypatch.setenv("CKPTSYNC_ENGINE_API_KEY", "hunter2")
    for options in ((), ("watch",), ("--json",)):
        assert "hunter2" not in ckptsync("config", *options).out
    assert found(ckptsync, "watch")["token"] == ("(secret)", "CKPTSYNC_SIDECAR_TOKEN")
    assert ckptsync("config", "wach").code == 2


def test_a_publisher_is_set_up_by_the_same_file_if_it_asks_for_that(monkeypatch):
    write(
        '[publisher]\nmax_lag = 4\ndtype = "bfloat16"\nwriters = "all"\n[publisher.retention]\nkeep_last = 3\n'
        "[publisher.delta]\nanchor_every = 8\nskip = [4]\n"
    )
    monkeypatch.setenv("CKPTSYNC_PUBLISHER_MAX_LAG", "7")
    config = package.PublisherConfig.load(writers="rank0")
    assert (config.max_lag, config.dtype, config.writers) == (7, torch.bfloat16, "rank0")
    assert config.retention == package.Retention(keep_last=3)
    assert config.delta == package.DeltaPolicy(anchor_every=8, skip=(4,))
    assert package.PublisherConfig() == package.PublisherConfig(max_lag=None), "nothing is read unless it is asked for"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_lags = 3", "'max_lag' is the nearest"),
        ('dtype = "bf17"', "no dtype of torch"),
        ('max_lag = "four"', "max_lag = 'four' of ckptsync.toml"),
        ("[publisher.retention]\nkeep_lst = 3", "'keep_last' is the nearest"),
        ("[publisher.retention]\nkeep_last = 1", "must be a whole number of at least 2"),
    ],
)
def test_what_a_publisher_cannot_be_set_to_is_refused_by_name(text, words):
    write(f"[publisher]\n{text}")
    with pytest.raises(InvalidInput) as raised:
        package.PublisherConfig.load()
    assert words in str(raised.value)


def test_every_option_that_can_be_set_has_one_variable():
    from ckptsync.cli import load_commands
    from ckptsync.cli.settings import options

    commands = load_commands()
    keys = {option.key: option.variable for command in commands.values() for option in options(command)}
    assert {"root", "engine", "url", "stage", "follow", "poll", "keep_last", "proof", "serve"} <= keys.keys()
    assert not {"version", "json", "from", "why", "dry_run"} & keys.keys()
    tokens = {name: option.variable for name, c in commands.items() for option in options(c) if option.key == "token"}
    assert tokens == {"watch": "CKPTSYNC_SIDECAR_TOKEN", "dashboard": "CKPTSYNC_DASHBOARD_TOKEN"}
    assert keys["keep_last"] == "CKPTSYNC_KEEP_LAST"
    assert Settings.read(environ={}).of("gc", keys) == {}


def test_a_password_in_an_url_is_not_shown(ckptsync, monkeypatch):
    monkeypatch.setenv("CKPTSYNC_ROOT", "s3://user:pw666@bucket/x")
    write('[watch]\nurl = ["http://u:pw667@a:1"]\n')
    shown = ckptsync("config", "--json").out
    assert "(secret)@bucket/x" in shown
    assert "(secret)@a:1" in shown
    assert "pw66" not in shown


def test_config_of_the_publisher_lists_what_a_file_may_say_of_it(ckptsync):
    write("[publisher]\nmax_lag = 4\n")
    listed = found(ckptsync, "publisher")
    assert listed["max_lag"] == (4, "ckptsync.toml [publisher]")
    assert listed["writers"] == ("rank0", "default")
    assert "publisher" in ckptsync("config", "publishers").err
