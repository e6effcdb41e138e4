"""The tables of docs/errors.md: what somebody does wrong, and the words that answer.

A test that runs the uses of a section hands them to `settle`, which fails where the page says
anything else. With CADRE_WRITE_ERRORS=1 in the environment it writes the section instead. A section
stands between two lines of the page:

    <!-- errors NAME, written by its test -->
    <!-- end of errors -->
"""
import os
import pathlib
import re

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs/errors.md"


def code(text):
    """`text` in a cell of a table, whatever it holds."""
    start, end = ("``", " ``") if "`" in text else ("`", "`")
    return start + text.replace("|", "\\|").replace("\n", " ") + end


def table(rows):
    """Markdown of (use, answer)s."""
    lines = [f"| {code(use)} | {code(answer)} |\n" for use, answer in rows]
    return "| use | answer |\n|---|---|\n" + "".join(lines)


def settle(name, rows, page=PAGE):
    """Compares a section of the page with rows of (use, answer), or writes it."""
    text = page.read_text()
    section = re.search(rf"(<!-- errors {name}, written by its test -->\n)(.*?)"
                        "(<!-- end of errors -->)", text, re.S)
    assert section, f"{page.name} has no section {name}; add its two lines"
    written, got = section[2], table(rows)
    if os.environ.get("CADRE_WRITE_ERRORS") == "1":
        page.write_text(text[:section.start(2)] + got + text[section.end(2):])
    elif written != got:
        differ = set(written.splitlines()) ^ set(got.splitlines())
        page_line = next((line for line in written.splitlines() if line in differ), "(nothing)")
        run_line = next((line for line in got.splitlines() if line in differ), "(nothing)")
        raise AssertionError(f"section {name} of {page.name} is not what the uses say; write it "
                             f"with CADRE_WRITE_ERRORS=1.\n  page: {page_line}\n"
                             f"  uses: {run_line}")
