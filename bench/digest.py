#!/usr/bin/env python3
"""Sums up benchmark records: for every pass the geometric mean and the lowest of the ratios to each
peer (above 1: cadre is faster), host times, and facts.

  digest.py RECORD.json...
"""
import json
import math
import pathlib
import sys


def work_of(case):
    """What cells are summed up together: a pass of the GEMM, a call of a layer."""
    words = case["problem"].split()
    if words[0] == "grouped_gemm":
        added = " into fp32" if "accumulate=yes" in words and "out=f32" in words else ""
        return " ".join(words[:2]) + added
    start = [f"from {case['from']}"] if "from" in case else []
    return " ".join([words[0], *([case["call"]] if "call" in case else []), *start])


def ratios(record):
    found = {}
    for case in record["cases"]:
        for peer, speed in case.get("speed_of_peer", {}).items():
            found.setdefault((work_of(case), peer), []).append((speed, case))
    for (work, peer), all_of in sorted(found.items()):
        mean = math.exp(sum(math.log(max(speed, 1e-9)) for speed, _ in all_of) / len(all_of))
        low, case = min(all_of, key=lambda pair: pair[0])
        where = f"{case.get('layer', case['problem'])}, {case['routing']}"
        yield (f"  {work:28} over {peer:24} mean {mean:6.3f}  lowest {low:6.3f} ({where})"
               f"  {len(all_of)} cells")


def rates(record):
    """Bytes a second, where that is what bounds: few rows for the weights that are read."""
    for case in record["cases"]:
        if case.get("bytes") and case.get("flops", 0) < 600 * case["bytes"]:
            yield (f"  {case['bytes'] / case['us']['cadre'] / 1e3:7.0f} GB/s  "
                   f"{case.get('layer', '')}  {case['problem']}")


def host_times(record):
    for case in record["cases"]:
        if "host_us" in case:
            yield (f"  {case['host_us']:7.2f} us, p90 {case['host_us_p90']:7.2f}  {case['call']:8} "
                   f"{case['problem']}")


def facts(record):
    for fact in record.get("facts", []):
        yield f"  {fact['value']:12.4g} {fact.get('unit', ''):14} {fact['name']}"


def main(paths):
    for path in map(pathlib.Path, paths):
        if not path.exists():
            continue
        record = json.loads(path.read_text())
        print(f"{path.name}: {record['machine']}, commit {record['commit']}")
        for peer, why in record.get("absent", {}).items():
            print(f"  {peer} is not here: {why}")
        record.setdefault("cases", [])
        lines = [*ratios(record), *host_times(record), *facts(record)]
        if "few-tokens" in path.name or "accumulate" in path.name:
            lines += rates(record)
        print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
