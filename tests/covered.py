"""What the measured run before has run of ckptsync and watchers: the modules below the bar, and the total.

    python -m coverage run -m pytest; python -m coverage combine; python tests/covered.py

Ends with 2 if the total is below the bar, `fail_under` in pyproject.toml. `make coverage` shows it line by line.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from coverage import Coverage


def main() -> int:
    measured = Coverage()
    measured.load()
    bar = float(str(measured.get_option("report:fail_under")))
    total = measured.json_report()
    with open(str(measured.get_option("json:output")), encoding="utf-8") as file:
        report = json.load(file)
    for path, module in report["files"].items():
        if module["summary"]["percent_covered"] < bar:
            print(line(path, module))
    print(f"coverage: {total:.2f} % of {report['totals']['num_statements']} lines; the bar is {bar:.0f} %")
    return 0 if total >= bar else 2


def line(path: str, module: dict[str, Any]) -> str:
    return f"{path}: {module['summary']['percent_covered']:.0f} %, not run: {spans(module['missing_lines'])}"


def spans(lines: list[int]) -> str:
    """4, 5, 6, 9 is 4-6, 9."""
    found: list[list[int]] = []
    for number in lines:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


if __name__ == "__main__":
    sys.exit(main())
