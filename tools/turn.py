#!/usr/bin/env python3
"""What takes long is done in turn: `tools/turn.py PATH...` prints those of these files that the
last commits touched, and a third of the others, at each commit another third, so that three commits
in a row see all. Where git has no such history it prints all.
"""
import pathlib
import subprocess
import sys

RECENT_COMMITS = 8


def git(source, *words):
    """What git says, or nothing where it fails."""
    try:
        done = subprocess.run(["git", "-C", source, *words], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def changed_files(source):
    """Paths below `source` that differ from those of some commits ago; None without a history."""
    before = git(source, "rev-parse", "--verify", f"HEAD~{RECENT_COMMITS}").strip()
    if not before:
        return None
    return git(source, "diff", "--name-only", "--relative", before).splitlines()


def in_turn(source, items, is_touched):
    """(those that are touched, those of the others whose turn it is). Without a history all are
    touched. is_touched: of an item and the changed files."""
    changed = changed_files(source)
    if changed is None:
        return items, []
    turn = int(git(source, "rev-list", "--count", "HEAD"))
    touched = [item for item in items if is_touched(item, changed)]
    others = [item for at, item in enumerate(items) if at % 3 == turn % 3 and item not in touched]
    return touched, others


def main(paths):
    root = pathlib.Path(__file__).resolve().parent.parent
    touched, others = in_turn(root, sorted(paths), lambda path, changed: path in changed)
    print("\n".join([*touched, *others]))


if __name__ == "__main__":
    main(sys.argv[1:])
