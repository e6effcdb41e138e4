"""The documentation as a site: it builds without a warning, is whole, and fetches nothing."""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from urllib.parse import unquote

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = ["mkdocs.yml", "docs", "include", "examples", "torch/cadre", "tools/site.py",
         "tools/site_docstrings.py", "LICENSE", *(page.name for page in ROOT.glob("*.md"))]


def build(root, site):
    return subprocess.run([sys.executable, "-m", "mkdocs", "build", "--site-dir", site], cwd=root,
                          capture_output=True, text=True)


def problems(site):
    """Links of a site that lead nowhere, and what a browser would fetch from elsewhere."""
    pages = {path: path.read_text() for path in sorted(site.rglob("*.html"))}
    ids = {path: set(re.findall(r'\sid="([^"]+)"', html)) | {"", "__skip"}
           for path, html in pages.items()}
    for path, html in pages.items():
        where = path.relative_to(site)
        fetched = re.findall(r'<(?:img|script|source|iframe)\b[^>]*?\ssrc="([^"]+)"', html)
        fetched += re.findall(r'<link\b[^>]*?\srel="(?:stylesheet|icon|preconnect)"[^>]*?>', html)
        yield from (f"{where}: fetches {what}" for what in fetched if "//" in what)
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in re.findall(r'(?:href|src)="([^"]+)"', html):
            if re.match(r"\w+:", link):
                continue
            target, _, anchor = unquote(link).partition("#")
            there = (path.parent / target).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file() or anchor not in ids.get(there, {anchor}):
                yield f"{where}: {link} leads nowhere"


class Site(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.site = cls.folder / "site"
        cls.built = build(ROOT, cls.site)

    def test_it_builds_without_a_warning_and_is_whole(self):
        self.assertEqual(self.built.returncode, 0, self.built.stdout + self.built.stderr)
        self.assertEqual(list(problems(self.site)), [])

    def test_every_page_and_header_is_there(self):
        pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for path in pages:
            name = path.relative_to(ROOT).as_posix()
            name = "index.html" if name == "README.md" else name.removesuffix(".md") + ".html"
            self.assertTrue((self.site / name).is_file(), name)
        for path in (ROOT / "include/cadre").glob("*.h"):
            html = (self.site / f"include/cadre/{path.name}.html").read_text()
            self.assertIn("pragma", html)

    def test_the_reference_has_every_docstring(self):
        page = (ROOT / "docs/reference.md").read_text()
        names = re.findall(r"^\| `(cadre\.[\w.]+)` ", page, re.M)
        html = (self.site / "docs/reference.html").read_text()
        self.assertGreater(len(names), 40)
        self.assertEqual([name for name in names if f'id="{name}"' not in html], [])
        self.assertIn("<strong><code>num_gemms</code></strong>: E, 1 or more", html)

    def test_every_plot_is_on_a_page(self):
        text = "".join(page.read_text() for page in ROOT.glob("docs/**/*.md"))
        for plot in (ROOT / "docs/plots").glob("*.svg"):
            self.assertIn(f"plots/{plot.name})", text)

    def test_faults_are_seen(self):
        for part in PARTS:
            to = self.folder / "tree" / part
            to.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, to)
        page = self.folder / "tree/docs/cli.md"
        page.write_text(page.read_text() + "\n[gone](gone.md), [no heading](train.md#none)\n")
        (page.parent / "stray.md").write_text("# In no list of pages\n")
        result = build(self.folder / "tree", self.folder / "other")
        self.assertNotEqual(result.returncode, 0)
        for words in ("'gone.md'", "'train.md#none'", "docs/stray.md"):
            self.assertIn(words, result.stdout + result.stderr)
        copy = self.folder / "tree/index.html"
        copy.write_text('<a href="gone.html"></a><a href="#none"></a><script src="https://x.org">')
        self.assertEqual(len(list(problems(copy.parent))), 3)


if __name__ == "__main__":
    unittest.main()
