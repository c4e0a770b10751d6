"""The table of docs/benchmarks from a run of the whole product of layouts, precisions, recompute policies and families.

python -m pytest tests/multiproc/test_parity.py -k test_product --junitxml=product.xml
python scripts/parity_table.py product.xml
"""

from __future__ import annotations

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

_CASE = re.compile(r"test_product\[(?P<layout>.+)-(?P<precision>fp32|bf16)-(?P<recompute>none|full|offload)-(?P<family>\w+)\]")


def read_worst(paths: list[Path]) -> dict[tuple[str, str], dict[str, list[float]]]:
    """(layout, precision) -> recompute policy -> the families' worst differences; a failed case is infinite."""
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in (case for path in paths for case in ElementTree.parse(path).iter("testcase")):
        matched = _CASE.fullmatch(case.get("name", ""))
        if matched is None or case.find("skipped") is not None:
            continue
        value = case.find("properties/property[@name='worst_difference']")
        failed = value is None or case.find("failure") is not None
        found[matched["layout"].replace("_", " "), matched["precision"]][matched["recompute"]].append(
            float("inf") if failed or value is None else float(value.get("value", "inf"))
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path, nargs="+", help="files that pytest wrote with --junitxml")
    worst = read_worst(parser.parse_args().junit)
    if not worst:
        print("no case of test_product in this file", file=sys.stderr)
        return 2
    policies = ("none", "full", "offload")
    print("| layout | precision | " + " | ".join(f"recompute {policy}" for policy in policies) + " |\n|---|---|" + "---|" * len(policies))
    for (layout, precision), by_policy in worst.items():
        cells = [f"{max(by_policy[policy]):.1e} ({len(by_policy[policy])})" if by_policy[policy] else "" for policy in policies]
        print(f"| {layout} | {precision} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
