"""`make mutation`: mutates the modules that `tool.mutmut` in pyproject.toml names, and prints what no test notices.

Exits with 1 if a survivor is not in `survivors.toml`, which says of each why it may live, or if a line there names a
mutant that is not made any more. Those that it names are not tried: each would be, by every test that reaches it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from difflib import ndiff
from pathlib import Path

from mutmut.__main__ import copy_also_copy_files, copy_src_dir, create_mutants
from mutmut.configuration import config
from mutmut.mutation.data import MutantLineSpans, SourceFileMutationData
from mutmut.mutation.file_mutation import filter_mutants_with_type_checker
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.utils.file_utils import walk_mutatable_files

MUTANTS = Path("mutants")
LIVING, FATES = MUTANTS / "living.json", MUTANTS / "fates.json"
SURVIVORS = Path(__file__).with_name("survivors.toml")


def main() -> int:
    fates = dict.fromkeys(_made(), "survived")
    fates |= dict.fromkeys(filter_mutants_with_type_checker(), "types")
    explained, lines = _explained(), {name: _line(name) for name, fate in fates.items() if fate == "survived"}
    fates |= {name: "explained" for name, line in lines.items() if line in explained}
    LIVING.write_text(json.dumps([name for name, fate in fates.items() if fate == "survived"]))
    status = _run_tests()
    for name, (fate, _) in json.loads(FATES.read_text())["fate"].items():
        fates[name] = fate
    _print_table(fates)
    unexplained = sorted({lines[name] for name, fate in fates.items() if fate == "survived"})
    gone = sorted(explained - set(lines.values()))
    print(*unexplained, f"{len(unexplained)} survivors are not in {SURVIVORS.name}", sep="\n")
    print(*gone, f"{len(gone)} lines of {SURVIVORS.name} name no mutant that the tests are for", sep="\n")
    return status or bool(unexplained or gone)


def _made() -> list[str]:
    """The names of all mutants, below `mutants/`."""
    set_mutant_under_test("mutant_generation")
    MUTANTS.mkdir(exist_ok=True)
    copy_src_dir()
    copy_also_copy_files()
    create_mutants(max_children=1)
    names: list[str] = []
    for path in walk_mutatable_files():
        file = SourceFileMutationData(path=path)
        file.load()
        names += file.exit_code_by_key
    return names


def _run_tests() -> int:
    """The selected tests against the mutants; cases drawn at random are few and the same for each."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.mutation.plugin", "-o", "timeout_func_only=true"]
    command += [
        "-o",
        "tmp_path_retention_policy=failed",
        "--assert=plain",
        "--tb=native",
        *config().pytest_add_cli_args,
    ]
    command += config().pytest_add_cli_args_test_selection
    here = {"PYTHONPATH": str(MUTANTS.resolve()), "CKPTSYNC_HYPOTHESIS": "mutation"}
    return subprocess.run(command, cwd=MUTANTS, env={**os.environ, **here}, check=False).returncode


def _print_table(fates: dict[str, str]) -> None:
    columns = ("types", "killed", "timeout", "died", "explained", "survived")
    print(f"{'':24}{'mutants':>9}", *(f"{column:>10}" for column in columns), sep="")
    for module in sorted({_module(name) for name in fates}):
        count = Counter(fate for name, fate in fates.items() if _module(name) == module)
        print(f"{module:24}{count.total():9}", *(f"{count[column]:10}" for column in columns), sep="")


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _line(name: str) -> str:
    """`module.function: what the mutant says there`, which outlives edits elsewhere in the file."""
    module, _, function = name.rpartition(".")
    original = function.partition("__mutmut_")[0]
    spans = MutantLineSpans.load(module.replace(".", "/") + ".py")
    before, after = spans.read_function_sources([f"{original}__mutmut_orig", function])  # type: ignore[union-attr]
    after = after.replace(f"{function}(", f"{original}__mutmut_orig(")
    changes = list(ndiff(before.splitlines(), after.splitlines()))
    said = [" ".join(line[1:].split()) for line in changes if line.startswith("+ ")]
    gone = ["without " + " ".join(line[1:].split()) for line in changes if line.startswith("- ")]
    plain = original.removeprefix("xǁ").removeprefix("x_").replace("ǁ", ".")
    return f"{module}.{plain}: {' / '.join(said or gone)}"


def _explained() -> set[str]:
    return {line for kind in tomllib.loads(SURVIVORS.read_text()).values() for line in kind["lines"]}


if __name__ == "__main__":
    raise SystemExit(main())
