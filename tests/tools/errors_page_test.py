"""tools/errors_page.py on a page of its own: sees what differs, writes where it is told to."""
import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import errors_page

ROWS = [("cadre a | b", "x is `1`"), ("cadre c", "y is 2")]
PAGE = """before
<!-- errors one, written by its test -->
<!-- end of errors -->
<!-- errors two, written by its test -->
behind
<!-- end of errors -->
"""


class ErrorsPage(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.page = pathlib.Path(folder.name) / "page.md"
        self.page.write_text(PAGE)

    def write(self):
        with mock.patch.dict(os.environ, CADRE_WRITE_ERRORS="1"):
            errors_page.settle("one", ROWS, self.page)

    def test_writes_one_section_and_agrees_with_it(self):
        self.write()
        errors_page.settle("one", ROWS, self.page)
        text = self.page.read_text()
        self.assertIn("| `cadre a \\| b` | ``x is `1` `` |\n| `cadre c` | `y is 2` |\n", text)
        start = text.index("<!-- errors two")
        self.assertEqual(text[start:], PAGE[PAGE.index("<!-- errors two"):])

    def test_names_the_first_difference(self):
        self.write()
        for rows in ([ROWS[0], ("cadre c", "y is 3")], ROWS[:1], [*ROWS, ("cadre d", "")]):
            with self.assertRaisesRegex(AssertionError, "section one of page.md .*"):
                errors_page.settle("one", rows, self.page)
        with self.assertRaisesRegex(AssertionError, "y is 2.*\n.*y is 3"):
            errors_page.settle("one", [ROWS[0], ("cadre c", "y is 3")], self.page)

    def test_a_section_that_is_absent_is_named(self):
        with self.assertRaisesRegex(AssertionError, "page.md has no section three"):
            errors_page.settle("three", ROWS, self.page)


if __name__ == "__main__":
    unittest.main()
