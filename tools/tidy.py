#!/usr/bin/env python3
"""Checks the rules of STYLE.md that a machine can check: `tools/tidy.py [ROOT]`, `ctest -L tidy`.

Prints one line per finding, `path:line: what; what to do`, and exits 1 if there was any. The data
of the rules is tools/layers.toml. Needs Python 3.11 and nothing else.
"""
import os
import pathlib
import posixpath
import re
import sys
import tomllib

import cpp_scan

SOURCE = {".h", ".cuh", ".cpp", ".cu"}
TEXT = SOURCE | {".py", ".md", ".toml", ".cmake", ".sh", ".json", ".txt", ".in"}
SKIPPED = {"build", "__pycache__"}
ROOMS_HEADER = "| room | holds | may include |"
INCLUDE = re.compile(r'\s*#\s*include\s+["<]([^">]+)[">]')
EXEMPTION = re.compile(r"//\s*tidy:\s*(\w+)\s+because\s+(.+)")
STANDARD = set("""algorithm any array atomic barrier bit bitset charconv chrono cmath codecvt
compare complex concepts condition_variable coroutine deque exception execution filesystem format
forward_list fstream functional future initializer_list iomanip ios iosfwd iostream istream
iterator latch limits list locale map memory memory_resource mutex new numbers numeric optional
ostream queue random ranges ratio regex semaphore set shared_mutex source_location span sstream
stack stdexcept stop_token streambuf string string_view strstream syncstream system_error thread
tuple type_traits typeindex typeinfo unordered_map unordered_set utility valarray variant vector
version cassert cctype cerrno cfenv cfloat cinttypes climits clocale csetjmp csignal cstdarg cstddef
cstdint cstdio cstdlib cstring ctime cuchar cwchar cwctype""".split())


class File:
    def __init__(self, root, path):
        self.path = path
        self.text = (root / path).read_text(errors="replace")
        self.lines = self.text.split("\n")
        self.source = cpp_scan.Source(self.text) if pathlib.Path(path).suffix in SOURCE else None
        self.exemptions, self.used = {}, set()
        for number, comment in self.source.comments if self.source else ():
            match = EXEMPTION.match(comment)
            if match and len(match.group(2).split()) >= 3:
                self.exemptions[number] = (match.group(1), match.group(2))

    def exempt(self, rule, first, last):
        """Whether a `// tidy: rule because ...` stands on one of these lines."""
        hits = [n for n in range(first, last + 1) if self.exemptions.get(n, ("",))[0] == rule]
        self.used.update(hits)
        return bool(hits)


def inside(path, folders):
    """The longest of `folders` that is `path` or contains it."""
    return max((f for f in folders if path == f or path.startswith(f + "/")), key=len, default=None)


def check_includes(file, rules, root):
    here = inside(file.path, rules["may_include"])
    if here is None:
        yield 1, "this folder is no room of tools/layers.toml; move the file, or add the room"
        return
    allowed = rules["may_include"][here]
    for number, line in enumerate(file.lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        name = match.group(1)
        bases = (pathlib.PurePosixPath(file.path).parent.as_posix(), "include", "src", "")
        target = next((posixpath.normpath(posixpath.join(b, name)) for b in bases
                       if (root / b / name).is_file()), None)
        if target is None:
            yield from check_outside(number, name, here, rules["outside"])
        elif "*" not in allowed and inside(target, rules["may_include"]) != here and not inside(
                target, allowed):
            yield number, (f"{here} may not include {target}; it may include "
                           f"{', '.join(allowed) or 'the standard library only'}")


def check_outside(number, name, here, outside):
    if name in STANDARD:
        return
    prefix = max((p for p in outside if name.startswith(p)), key=len, default=None)
    if prefix is None:
        yield number, f"unknown header {name}; it is no file here and [outside] does not list it"
    elif here not in outside[prefix]:
        yield number, f"{here} may not include {name}; only {', '.join(outside[prefix])} may"


def check_lines(file, limits):
    for number, line in enumerate(file.lines, 1):
        if len(line) > limits["line_columns"]:
            yield number, f"line has {len(line)} columns; the limit is {limits['line_columns']}"
    room = inside(file.path, limits["file_lines_in"])
    count, limit = len(file.lines) - 1, limits["file_lines_in"].get(room, limits["file_lines"])
    if count > limit and not file.exempt("long", 1, 3):
        yield 1, f"file has {count} lines; split it, the limit is {limit}"


def check_shapes(file, limits):
    """Lengths and parameter counts of functions, parameter counts of templates."""
    for f in file.source.functions:
        kernel = "__global__" in f.words
        lines = f.end - (f.open if kernel else f.start) + 1
        limit = limits["kernel_lines" if kernel else "function_lines"]
        if f.body and lines > limit and not file.exempt("long", f.start - 1, f.open + 1):
            what = "kernel body" if kernel else "function"
            yield f.start, f"{what} {f.name} has {lines} lines; split it, the limit is {limit}"
        limit = limits["parameters"]
        free = f.name.isupper() or inside(file.path, limits["parameters_free"])
        if f.parameters > limit and not free:
            yield f.start, f"{f.name} has {f.parameters} parameters; past {limit} pass a struct"
    for t in file.source.templates:
        limit = limits["template_parameters"]
        if t.parameters > limit:
            yield t.line, f"template has {t.parameters} parameters; past {limit} pass one struct"


def check_variables(file):
    if inside(file.path, ["include", "src"]):
        for v in file.source.variables:
            if v.mutable:
                yield v.line, f"{v.name} is a mutable global; make it const, or pass it"


def check_bans(file, bans):
    code = list(file.source.code)
    for number, line in file.source.directives:
        code[number - 1] = line
    for ban in bans:
        if not inside(file.path, ban["where"]) or inside(file.path, ban.get("except", [])):
            continue
        for number, line in enumerate(code, 1):
            match = re.search(ban["pattern"], line)
            if not match or INCLUDE.match(line):
                continue
            if not file.exempt(ban["name"], number - 1, number):
                yield number, f"'{match.group().strip()}' ({ban['name']}); {ban['why']}"


def parts(identifier):
    """The lower-case parts of a snake_case or CamelCase identifier, joined and fenced by `_`."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier)
    return "_" + split.lower().strip("_") + "_"


def check_words(file, words):
    if not inside(file.path, words["rooms"]):
        return
    places = {}
    for word, number in file.source.tokens:
        places.setdefault(word, []).append(number)
    for word, numbers in places.items():
        fenced = parts(word)
        for bad, good in words["instead"].items():
            if f"_{bad}_" in fenced:
                for number in numbers:
                    yield number, f"'{word}' says {bad}; this project says {good}"


def check_phrases(file, phrases):
    """Phrases match across the end of a line and the signs that begin a comment."""
    if not inside(file.path, phrases["where"]) or inside(file.path, phrases["except"]):
        return
    lower = file.text.lower()
    for bad, good in phrases["instead"].items():
        if bad.split()[0].lower() not in lower:  # faster than a pattern, and mostly the answer
            continue
        pattern = r"[\s/#*]+".join(map(re.escape, bad.split()))
        for match in re.finditer(rf"\b{pattern}\b", file.text, re.IGNORECASE):
            number = file.text.count("\n", 0, match.start()) + 1
            yield number, f"'{bad}' is no word of this project; it says {good}"


def check_text(file, names):
    """What holds for every text file: its name, no machine's paths, no ownerless to-do."""
    for part in pathlib.PurePosixPath(file.path).parts:
        if part.split(".")[0].lower() in names["banned"]:
            yield 1, f"'{part}' says nothing; name the room or file by what it holds"
    todo = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b(?!\(#\d+\))")
    machine = re.compile(r"(?<![\w.$}~>])/(work|root|home|Users)/")
    for number, line in enumerate(file.lines, 1):
        if todo.search(line):
            yield number, "a to-do without an issue; write TO" "DO(#number), or do it"
        if machine.search(line):
            yield number, "an absolute path of one machine; write it relative to the repository"


def check_exemptions(file):
    for number, comment in file.source.comments if file.source else ():
        if re.match(r"//\s*tidy:", comment) and number not in file.used:
            yield number, ("this exemption excuses nothing; the form is "
                           "`// tidy: <rule> because <reason of three words>`, where it is needed")


def check_built(file, root):
    """Every source is named in the CMakeLists.txt of its folder, or in a list beside it: nothing is
    globbed, nothing forgotten."""
    path = pathlib.PurePosixPath(file.path)
    if path.suffix not in (".cpp", ".cu"):
        return
    for folder in path.parents:
        list_file = root / folder / "CMakeLists.txt"
        if list_file.is_file():
            listed = list_file.read_text() + "".join(
                part.read_text() for part in sorted(list_file.parent.glob("*.cmake")))
            if not re.search(rf"(?<![\w]){re.escape(path.stem)}(?![\w])", listed):
                yield 1, f"not named in {folder}/CMakeLists.txt, so never built; add it there"
            return


def check_stems(root, stem):
    """Each operation, and each layer, has a file of its name in every room."""
    for header in sorted((root / "include/cadre").glob("*.h")):
        code = "\n".join(cpp_scan.Source(header.read_text()).code)
        if not re.search(stem["declares"], code):
            continue
        for pattern in stem["rooms"]:
            wanted = pattern.format(header.stem)
            if wanted not in stem.get("unfinished", []) and not any(root.glob(wanted)):
                yield f"include/cadre/{header.name}", 1, f"{stem['kind']} without {wanted}; add it"


def rooms_cell(room, rules):
    """What ARCHITECTURE.md says that a room may include."""
    def short(target):
        name = target.removeprefix("src/").replace("include/cadre", "include")
        return f"`{name}`" if name.endswith(".h") else name

    allowed = rules["may_include"][room]
    if "*" in allowed:
        return "everything"
    libraries = [name for header, name in rules["libraries"].items()
                 if room in rules["outside"].get(header, [])]
    return ", ".join([short(target) for target in allowed] + libraries) or "the standard library"


def check_rooms_table(root, rules):
    """The table of rooms in ARCHITECTURE.md has the rooms of tools/layers.toml and its rights."""
    path = root / "ARCHITECTURE.md"
    if not path.is_file():
        return
    lines = path.read_text().split("\n")
    if ROOMS_HEADER not in lines:
        yield "ARCHITECTURE.md", 1, f"no table of rooms; it begins with {ROOMS_HEADER}"
        return
    unseen = {room for room in rules["may_include"] if (root / room).is_dir()}
    for number in range(lines.index(ROOMS_HEADER) + 2, len(lines)):
        cells = [cell.strip() for cell in lines[number].strip("|").split("|")]
        if len(cells) != 3:
            break
        room = cells[0].strip("`/")
        unseen.discard(room)
        want = rooms_cell(room, rules) if room in rules["may_include"] else ""
        if cells[2] != want:
            yield ("ARCHITECTURE.md", number + 1,
                   f"{room} may include '{cells[2]}' here and '{want}' in tools/layers.toml")
    for room in sorted(unseen):
        yield ("ARCHITECTURE.md", 1,
               f"the table of rooms lacks {room}, which may include {rooms_cell(room, rules)}")


def check_links(file, root):
    """A link within the repository leads somewhere. Code blocks have no links."""
    in_code = False
    for number, line in enumerate(file.lines, 1):
        in_code ^= line.startswith("```")
        if in_code:
            continue
        for target in re.findall(r"\]\(([^)\s#]+)", line):
            path = root / pathlib.PurePosixPath(file.path).parent / target
            if "://" not in target and not path.exists():
                yield number, f"link to {target}, which does not exist"


def text_files(root):
    """Their paths in `root`. Builds and hidden folders, which may hold a torch, are not entered."""
    found = []
    for folder, folders, names in os.walk(root):
        relative = pathlib.PurePath(folder).relative_to(root)
        folders[:] = [name for name in folders if name not in SKIPPED and
                      (name == ".ci" or not name.startswith("."))]
        for path in (relative / name for name in names if not name.startswith(".")):
            if path.suffix in TEXT or path.parts[0] == ".ci" or path.name == "Makefile":
                found.append(path)
    return [path.as_posix() for path in sorted(found)]


def findings(root):
    """All (path, line, what), and the exemptions that are in use as (path, line, rule, reason)."""
    rules = tomllib.loads((root / "tools/layers.toml").read_text())
    found, excused = [], []
    for path in text_files(root):
        file = File(root, path)
        checks = [check_text(file, rules["names"]), check_phrases(file, rules["phrases"])]
        if file.source:
            checks += [check_includes(file, rules, root), check_lines(file, rules["limits"]),
                       check_shapes(file, rules["limits"]), check_variables(file),
                       check_bans(file, rules["ban"]), check_words(file, rules["words"]),
                       check_built(file, root), check_exemptions(file)]
        elif path.endswith(".py"):
            checks.append(check_lines(file, rules["limits"]))
        elif path.endswith(".md"):
            checks.append(check_links(file, root))
        found += [(path, number, what) for check in checks for number, what in check]
        excused += [(path, n, *file.exemptions[n]) for n in sorted(file.used)]
    found += [finding for stem in rules["stem"] for finding in check_stems(root, stem)]
    found += check_rooms_table(root, rules)
    return found, excused


def main(arguments):
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parent.parent)
    found, excused = findings(root)
    for path, number, rule, reason in excused:
        print(f"{path}:{number}: excused: {rule} because {reason}")
    for path, number, what in found:
        print(f"{path}:{number}: {what}")
    print(f"tidy: {len(found)} findings, {len(excused)} excused")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
