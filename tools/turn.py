#!/usr/bin/env python3
"""What takes long is done in turn: `tools/turn.py PATH...` prints those of these sources that the
last commits touched, or a file that they include, and a third of the others, at each commit another
one by chance. Where git has no such history it prints all.
"""
import functools
import hashlib
import pathlib
import re
import subprocess
import sys

RECENT_COMMITS = 12
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


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


def in_turn(source, items, is_touched, name=str):
    """(those that are touched, a third of the others). Without a history all are touched.
    is_touched: of an item and the changed files. name: of an item, none twice."""
    changed = changed_files(source)
    if changed is None:
        return items, []
    head = git(source, "rev-parse", "HEAD")
    touched = [item for item in items if is_touched(item, changed)]

    def lot(item):
        return hashlib.sha256((head + name(item)).encode()).digest()

    drawn = sorted(items, key=lot)[:-(-len(items) // 3)]
    return touched, [item for item in items if item in drawn and item not in touched]


class Includes:
    """Of the sources below a folder, what each includes."""

    def __init__(self, root):
        self.root = root

    @functools.cache
    def of(self, path):
        """Those of the file itself."""
        found = set()
        text = (self.root / path).read_text(errors="replace")
        for words in INCLUDE.findall(text):
            for folder in ("", "src", "include", pathlib.PurePath(path).parent):
                candidate = pathlib.PurePath(folder, words)
                if (self.root / candidate).is_file():
                    found.add(candidate.as_posix())
                    break
        return found

    def touches(self, path, changed):
        """Whether the file or one that it includes, or they, is among those."""
        seen, left = set(), [path]
        while left:
            one = left.pop()
            if one in changed:
                return True
            seen.add(one)
            left.extend(self.of(one) - seen)
        return False


def main(paths):
    root = pathlib.Path(__file__).resolve().parent.parent
    touched, others = in_turn(root, sorted(paths), Includes(root).touches)
    print("\n".join([*touched, *others]))


if __name__ == "__main__":
    main(sys.argv[1:])
